"""The real engine on `tiny` behind real HTTP, with a gate before its passes, for tests with `openai`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from serving import TINY, serving
from tiny_pair import TinyPair

from gateway.access import Keyring
from gateway.api.service import Service
from gateway.config import Config
from gateway.metrics import Metrics
from gateway.request import Served
from gateway.text import Tokenizer
from gateway.tiny import CHAT_TEMPLATE, END_OF_TEXT_ID, IM_END_ID, byte_tokenizer
from gateway.worker import Worker
from logs.recorder import Recorder

MESSAGES: Any = [{"role": "user", "content": "Say something."}]
TOOL_TEMPLATE = (
    "{{ greeting or '' }}{% for t in tools or [] %}[{{ t['function']['name'] }}]{% endfor %}" + CHAT_TEMPLATE
)
"""tiny's template with a place for tools and one keyword argument."""
ROUTINGS: dict[str, dict[str, Any]] = {
    "large_only": {"mode": "large_only"},
    "small_only": {"mode": "small_only"},
    "exact": {"protect_first": 0, "threshold": 0.1},
    "trust": {"accept": "trust", "protect_first": 0},
}


class Gated:
    """A model whose passes wait unless `open`; the one that `fail_in` counts down to fails."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.open = threading.Event()
        self.open.set()
        self.fail_in: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, feeds: Any) -> Any:
        self.open.wait(30)
        if self.fail_in is not None:
            self.fail_in -= 1
            if self.fail_in == 0:
                self.fail_in = None
                raise RuntimeError("no memory")
        return self._model.forward(feeds)


@dataclass
class Gateway:
    """A worker with its tape; `serving` puts a service with its own limits and keys before it."""

    worker: Worker
    recorder: Recorder
    large: Gated
    services: list[Service] = field(default_factory=list)

    def serving(self, config: Config = TINY, keys: Keyring | None = None) -> AbstractContextManager[str]:
        """The URL of a service while the block runs."""
        service = Service(
            config=config,
            metrics=Metrics(),
            model_name="tiny",
            recorder=self.recorder,
            engine=self.worker,
            keys=keys or Keyring(),
        )
        self.services.append(service)
        return serving(service)

    def wait_until_left(self) -> None:
        """Wait until no client's request is running any more (the test's own timeout ends it)."""
        while any(service.running for service in self.services):
            threading.Event().wait(0.005)

    def wait_until_idle(self) -> None:
        """Wait until the engine holds no row either."""
        self.wait_until_left()
        while self.worker.num_running or self.worker.num_waiting:
            threading.Event().wait(0.005)
        assert self.worker.settle()

    def trace(self, request_id: str) -> dict[str, Any]:
        """A request's summary once it is complete on the tape."""
        assert self.worker.settle()
        self.recorder.flush()
        trace = self.recorder.reader().trace(request_id)
        assert trace is not None
        return trace


@contextmanager
def serve_tiny(pair: TinyPair, data_dir: Path, template: str = CHAT_TEMPLATE) -> Iterator[Gateway]:
    """An engine over the shared pair, its chat template changed."""
    hf = byte_tokenizer()
    hf.chat_template = template
    large = Gated(pair.large)
    changed: Any = {"tokenizer": Tokenizer(hf, {IM_END_ID, END_OF_TEXT_ID}), "large": large}
    recorder = Recorder(data_dir)
    served = Served("tiny/small", "tiny/large", "a" * 16, "b" * 16, "cpu/float32/none", "test")
    worker = Worker(replace(pair, **changed).engine(), served, [recorder])
    worker.start()
    try:
        yield Gateway(worker, recorder, large)
    finally:
        worker.stop()
        recorder.close()
