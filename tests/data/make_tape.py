"""Make the fixture tape of the current schema version: `python tests/data/make_tape.py`.

Run it once when the schema version rises and keep the result for good: later versions must open, read and
replay it.
"""

import gzip
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tape_fakes import Script, record

from gateway.core import Accept, Mode
from gateway.policy import Policy
from logs.recorder import Recorder
from logs.schema import VERSION

POLICIES = {
    "exact": Policy(),
    "trust": Policy(accept=Accept.TRUST, max_small_run=6),
    "large": Policy(mode=Mode.LARGE_ONLY),
    "guarded": Policy(loop_ngram=3, loop_limit=2, threshold=0.2),
}


def main() -> None:
    """Two traces in a segment, two live; one interrupted."""
    target = Path(__file__).parent / f"tape-v{VERSION}"
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder)
        recorder = Recorder(data_dir)
        for i, (name, policy) in enumerate(POLICIES.items()):
            script = Script(policy, seed=i, num_tokens=24, request_id=name).run()
            record(recorder, script)
            if i == 1:
                recorder.compact()
        recorder.on_admit(
            replace(script.trace(), request=replace(script.trace().request, id="cut"), finished=None)
        )
        recorder.close()
        target.mkdir(exist_ok=True)
        with (
            (data_dir / "tape.duckdb").open("rb") as tape,
            gzip.open(target / "tape.duckdb.gz", "wb", 9) as out,
        ):
            shutil.copyfileobj(tape, out)
        shutil.copytree(data_dir / "segments", target / "segments", dirs_exist_ok=True)


if __name__ == "__main__":
    main()
