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

from fakes import ask_for, decode_one, fake_engine, near, noise_logits
from tape_fakes import SERVED, Script, passed, record

from gateway.core import Accept, Mode, Tick
from gateway.policy import Level, Policy
from gateway.request import Trace
from logs.recorder import Recorder
from logs.schema import VERSION

POLICIES = {
    "exact": Policy(),
    "trust": Policy(accept=Accept.TRUST, max_small_run=6),
    "large": Policy(mode=Mode.LARGE_ONLY),
    "guarded": Policy(loop_ngram=3, loop_limit=2, threshold=0.2),
}


def main() -> None:
    """Two traces in a segment, three live, one of them of three tiers; one interrupted."""
    target = Path(__file__).parent / f"tape-v{VERSION}"
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder)
        recorder = Recorder(data_dir)
        for i, (name, policy) in enumerate(POLICIES.items()):
            script = Script(policy, seed=i, num_tokens=24, request_id=name).run()
            record(recorder, script)
            if i == 1:
                recorder.compact()
        record_cascade(recorder)
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


def record_cascade(recorder: Recorder) -> None:
    """One answer that three tiers wrote."""
    large = noise_logits(1, 8)
    engine = fake_engine(near(large, 2, 1.2), large, middles=[near(large, 5, 0.6)], vocab_size=8)
    policy = Policy(accept=Accept.TOKEN_V3, threshold=0.2, protect_first=2, middle=Level(threshold=0.3))
    request = ask_for("cascade", (1, 2, 3), policy=policy, max_tokens=40)
    answer = decode_one(engine, request)
    trace = Trace(request, replace(SERVED, middle_models=("middle",), middle_hashes=("m" * 16,)))
    recorder.on_admit(trace)
    recorder.on_tick(Tick(0, passed(0), [], answer.tape))
    recorder.on_finish(replace(trace, finished=answer.finished))


if __name__ == "__main__":
    main()
