"""A worker without models for the API's tests: it writes a scripted text, at once or when told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.core import (
    Action,
    Counts,
    Delta,
    Finished,
    FinishReason,
    Outcome,
    Reason,
    Signals,
    Step,
    Tick,
    Tier,
    Timings,
    TopK,
)
from gateway.request import Request, Served, Trace
from gateway.text import TextStream, Tokenizer
from gateway.tiny import END_OF_TEXT_ID, IM_END_ID, byte_tokenizer
from gateway.worker import Observer, QueueFull

Deliver = Callable[[Delta], None]
ANSWER = "Zażółć 你好, 👩‍👩‍👧 wörld! "


def tiny_tokenizer() -> Tokenizer:
    """The tokenizer of `tiny`: one token a byte."""
    return Tokenizer(byte_tokenizer(), {IM_END_ID, END_OF_TEXT_ID})


@dataclass
class Job:
    """One choice that the fake has taken in."""

    request: Request
    deliver: Deliver
    text: TextStream
    script: list[int]
    counts: Counts = field(default_factory=Counts)
    idx: int = 0


class FakeWorker:
    """Answers with `answer`, over and over, a byte a token; every third token is the large model's.

    hold: nothing is delivered until `advance`. capacity: choices taken before QueueFull.
    """

    def __init__(self, observers: Sequence[Observer] = (), answer: str = ANSWER) -> None:
        self.tokenizer = tiny_tokenizer()
        self.max_model_len = 4096
        self.vocab_size = self.tokenizer.vocab_size
        self.served = Served("tiny/small", "tiny/large", "1" * 16, "2" * 16, "cpu/float32/none", "test")
        self.observers = observers
        self.answer = answer
        self.hold = False
        self.capacity = 1000
        self.ready = True
        self.kv_usage = 0.0
        self.distant: list[Any] = []
        self.num_waiting = 0
        self.jobs: dict[tuple[str, int], Job] = {}
        self.cancelled: list[str] = []
        self.seen: list[Request] = []
        self._ticks = 0
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)

    @property
    def num_running(self) -> int:
        return len(self.jobs)

    def settle(self, timeout_s: float = 30.0) -> bool:
        return True

    def stop(self, drain_s: float = 0.0) -> None:
        self.ready = False

    def submit(self, request: Request, deliver: Deliver) -> None:
        with self._lock:
            if len(self.jobs) >= self.capacity:
                raise QueueFull
            sampling = request.sampling
            text = TextStream(
                self.tokenizer,
                stop=sampling.stop,
                include_stop=sampling.include_stop_str_in_output,
                skip_special_tokens=sampling.skip_special_tokens,
            )
            raw = self.answer.encode()
            script = [raw[i % len(raw)] for i in range(sampling.max_tokens)]
            job = Job(request, deliver, text, script)
            self.jobs[request.id, request.choice] = job
            self.seen.append(request)
            self.tell("on_admit", Trace(request, self.served))
            self.changed.notify_all()
            if not self.hold:
                while (request.id, request.choice) in self.jobs:
                    self._write(job, 3)

    def cancel(self, request_id: str) -> None:
        with self._lock:
            self.cancelled.append(request_id)
            for job in [job for key, job in self.jobs.items() if key[0] == request_id]:
                self._end(job, "", [], FinishReason.ABORT)
            self.changed.notify_all()

    def advance(self, num_tokens: int = 1) -> None:
        """Write so many tokens of every held choice."""
        with self._lock:
            for job in list(self.jobs.values()):
                self._write(job, num_tokens)

    def fail(self, error: str) -> None:
        """End every held choice with an error, as a broken pass does."""
        with self._lock:
            for job in list(self.jobs.values()):
                self._end(job, "", [], FinishReason.ERROR, error=error)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
        """Wait until the condition holds after some submit or cancel."""
        with self.changed:
            return self.changed.wait_for(condition, timeout_s)

    def tell(self, event: str, what: object) -> None:
        for observer in self.observers:
            getattr(observer, event)(what)

    def _write(self, job: Job, num_tokens: int) -> None:
        text, steps = "", []
        for _ in range(num_tokens):
            step = _step(job, job.script[job.idx])
            steps.append(step)
            job.idx += 1
            if step.tier is Tier.LARGE:
                job.counts.large_tokens += 1
            else:
                job.counts.small_tokens += 1
            text += job.text.push(step.token_id)
            if job.text.stopped is not None:
                return self._end(job, text, steps, FinishReason.STOP, stop=job.text.stopped)
            if job.idx == len(job.script):
                return self._end(job, text + job.text.flush(), steps, FinishReason.LENGTH)
        self._publish(job, text, steps, None)
        return None

    def _end(
        self,
        job: Job,
        text: str,
        steps: list[Step],
        reason: FinishReason,
        *,
        stop: str | None = None,
        error: str | None = None,
    ) -> None:
        now = time.time()
        finished = Finished(reason, job.counts, Timings(job.request.received, now, now, now), stop, error)
        del self.jobs[job.request.id, job.request.choice]
        self._publish(job, text, steps, finished)

    def _publish(self, job: Job, text: str, steps: list[Step], finished: Finished | None) -> None:
        self._ticks += 1
        delta = Delta(job.request.id, job.request.choice, text, tuple(steps), finished)
        self.tell("on_tick", Tick(self._ticks, deltas=[delta], steps=list(steps)))
        if finished is not None:
            self.tell("on_finish", Trace(job.request, self.served, finished))
        job.deliver(delta)


def _step(job: Job, token: int) -> Step:
    large = job.idx % 3 == 2
    top = TopK((token, 65), (-0.25, -2.0))
    return Step(
        request_id=job.request.id,
        choice=job.request.choice,
        idx=job.idx,
        seq=job.idx,
        round=job.idx // 3,
        draft_pos=0,
        tick=job.idx,
        token_id=token,
        token_bytes=bytes([token]),
        tier=Tier.LARGE if large else Tier.SMALL,
        action=Action.DEFER if large else Action.KEEP,
        reason=Reason.LOW_CONFIDENCE if large else Reason.CONFIDENT,
        score=0.25 if large else 0.75,
        threshold=0.5,
        signals=Signals(0.75, 0.5, 0.5),
        run_length=0,
        ema_acceptance=1.0,
        draft_limit=5,
        guard_value=0.0,
        large_used=0,
        small_choice=token,
        small_topk=top,
        large_topk=top,
        p_large=0.75,
        large_choice=token,
        outcome=Outcome.LARGE if large else Outcome.ACCEPTED,
        audit_agrees=True,
        audit_source="verify",
        pass_id=job.idx,
        batch_rows=1,
        small_kv=0,
        large_kv=0,
        latency_us=1000,
        ts=time.time(),
    )
