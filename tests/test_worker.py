"""The engine's thread: many clients at once, cancelling, a full queue, draining, and its death."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from fakes import Answer, Gathered, Logits, ask_for, decode, decode_one, fake_engine, near, noise_logits
from structlog.testing import capture_logs
from tiny_pair import TinyPair

from gateway.core import Accept, Delta, FinishReason, Mode, Tick
from gateway.engine import Engine
from gateway.policy import Policy
from gateway.request import Request, Served, Trace
from gateway.worker import Observer, QueueFull, Worker

VOCAB = 8
LARGE = noise_logits(1, VOCAB)
SMALL = near(LARGE, 2, 1.0)
SERVED = Served("s", "l", "h1", "h2", "cpu/float32/none", "0")
PATIENCE_S = 20.0


def engine(**options: object) -> Engine:
    return fake_engine(SMALL, LARGE, vocab_size=VOCAB, **options)


class Client:
    """Collects the deltas of its choices; `done` is set with the last."""

    def __init__(self, num_choices: int = 1) -> None:
        self.deltas: list[Delta] = []
        self.threads: set[str] = set()
        self.done = threading.Event()
        self._left = num_choices

    def __call__(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self.threads.add(threading.current_thread().name)
        if delta.finished is not None:
            self._left -= 1
        if self._left == 0:
            self.done.set()

    def answer(self, choice: int = 0) -> Answer:
        assert self.done.wait(PATIENCE_S)
        answer = Answer()
        for delta in self.deltas:
            if delta.choice == choice:
                answer.take(delta)
        return answer

    @property
    def reason(self) -> FinishReason:
        return self.answer().finished.reason


@dataclass
class Notes:
    """An observer that writes everything down."""

    admitted: list[Trace] = field(default_factory=list)
    finished: list[Trace] = field(default_factory=list)
    tape: Gathered = field(default_factory=Gathered)

    def on_admit(self, trace: Trace) -> None:
        self.admitted.append(trace)

    def on_tick(self, tick: Tick) -> None:
        self.tape.take(tick)

    def on_finish(self, trace: Trace) -> None:
        self.finished.append(trace)


class Gate:
    """Logits that wait at a gate, so that a test decides when the engine moves on."""

    def __init__(self, logits: Logits) -> None:
        self.logits, self.open, self.reached = logits, threading.Event(), threading.Event()

    def __call__(self, context: tuple[int, ...]) -> object:
        self.reached.set()
        assert self.open.wait(PATIENCE_S)
        return self.logits(context)


@pytest.fixture
def start():
    """Start workers and stop them after the test."""
    started: list[Worker] = []

    def make(engine: Engine, *observers: Observer, **options: int) -> Worker:
        worker = Worker(engine, SERVED, observers, **options)
        worker.start()
        started.append(worker)
        return worker

    yield make
    for worker in started:
        worker.stop()


def gated(**options: object) -> tuple[Engine, Gate]:
    gate = Gate(LARGE)
    return fake_engine(SMALL, gate, vocab_size=VOCAB, **options), gate


def test_thirty_two_clients_at_once_get_what_they_get_alone(
    tiny_pair: TinyPair, start: Callable[..., Worker]
) -> None:
    rules = (Accept.EXACT, Accept.EXACT, Accept.TRUST, Accept.THRESHOLD)
    requests = [
        ask_for(
            f"c{i}",
            f"client number {i * 37} says".encode(),
            policy=Policy(protect_first=i % 3, accept=rules[i % 4], draft_length=1 + i % 8, threshold=0.3),
            max_tokens=8,
            seed=i,
            temperature=float(i % 2),
        )
        for i in range(32)
    ]
    alone = {r.id: decode_one(tiny_pair.engine(), r) for r in requests}
    notes, clients = Notes(), {r.id: Client() for r in requests}
    worker = start(tiny_pair.engine(num_blocks=20, large_wait_s=0.001), notes)
    senders = [threading.Thread(target=worker.submit, args=(r, clients[r.id])) for r in requests]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    for request in requests:
        got = clients[request.id].answer()
        assert alone[request.id].tokens == got.tokens
        assert alone[request.id].text == got.text
        assert {"engine"} == clients[request.id].threads
    assert worker.settle(PATIENCE_S)
    assert {t.request.id for t in notes.finished} == {r.id for r in requests}
    assert (worker.num_running, worker.num_waiting, worker.kv_usage) == (0, 0, 0.0)


def test_observers_hear_of_everything_and_settle_waits_for_it(start: Callable[..., Worker]) -> None:
    notes, client = Notes(), Client(num_choices=2)
    worker = start(engine(), notes)
    for choice in (0, 1):
        worker.submit(
            ask_for("n", choice=choice, temperature=1.0, policy=Policy(protect_first=4), max_tokens=6), client
        )
    answers = [client.answer(choice) for choice in (0, 1)]
    assert worker.settle(PATIENCE_S)
    assert [(t.request.choice, t.finished) for t in notes.admitted] == [(0, None), (1, None)]
    assert {t.request.choice: t.finished.reason for t in notes.finished} == {
        0: FinishReason.LENGTH,
        1: FinishReason.LENGTH,
    }
    for choice, answer in enumerate(answers):
        tape = notes.tape["n", choice]
        assert [row.token_id for row in tape.output] == answer.tokens
        assert all(row.signals is not None for row in tape.output)


def test_the_tape_hears_before_the_client(start: Callable[..., Worker]) -> None:
    order: list[str] = []

    class First(Notes):
        def on_tick(self, tick: Tick) -> None:
            if tick.deltas:
                order.append("tape")

    client = Client()

    def deliver(delta: Delta) -> None:
        order.append("client")
        client(delta)

    worker = start(engine(), First())
    worker.submit(ask_for(policy=Policy(mode=Mode.LARGE_ONLY), max_tokens=5), deliver)
    client.answer()
    assert order == ["tape", "client"] * 5


def test_cancelling_from_another_thread_ends_a_running_and_a_waiting_request(
    start: Callable[..., Worker],
) -> None:
    e, gate = gated(num_blocks=1)
    notes = Notes()
    worker = start(e, notes)
    running, waiting = Client(), Client()
    worker.submit(ask_for("a", max_tokens=50), running)
    worker.submit(ask_for("b", max_tokens=50), waiting)
    assert gate.reached.wait(PATIENCE_S)
    worker.cancel("a")
    worker.cancel("b")
    worker.cancel("never heard of")
    gate.open.set()
    assert (running.reason, waiting.reason) == (FinishReason.ABORT, FinishReason.ABORT)
    assert worker.settle(PATIENCE_S)
    assert worker.kv_usage == 0.0
    assert {t.request.id for t in notes.finished} == {"a", "b"}
    # At most the pass that was running when the client left was still delivered.
    assert len(running.answer().tokens) <= 1
    after = Client()
    worker.submit(ask_for("a", max_tokens=3), after)
    assert after.reason is FinishReason.LENGTH


def test_a_full_queue_refuses_and_recovers(start: Callable[..., Worker]) -> None:
    e, gate = gated(max_rows=1)
    worker = start(e, max_queue=2)
    clients = [Client() for _ in range(3)]
    worker.submit(ask_for("r0", max_tokens=2), clients[0])
    assert gate.reached.wait(PATIENCE_S)
    for i in (1, 2):
        worker.submit(ask_for(f"r{i}", max_tokens=2), clients[i])
    assert not worker.ready
    with pytest.raises(QueueFull):
        worker.submit(ask_for("r3"), Client())
    assert (worker.num_running, worker.num_waiting) == (1, 2)
    gate.open.set()
    assert {c.reason for c in clients} == {FinishReason.LENGTH}
    assert worker.ready


def test_a_name_in_use_is_refused(start: Callable[..., Worker]) -> None:
    e, gate = gated()
    worker, client = start(e), Client()
    worker.submit(ask_for("r", max_tokens=2), client)
    with pytest.raises(ValueError, match="already running"):
        worker.submit(ask_for("r", max_tokens=2), Client())
    gate.open.set()
    client.answer()


def test_what_can_never_be_served_is_refused_on_the_callers_thread(start: Callable[..., Worker]) -> None:
    worker = start(engine(max_model_len=8))
    with pytest.raises(ValueError, match="7 fit"):
        worker.submit(ask_for(prompt=[1] * 8), Client())


def test_a_client_that_raises_is_cancelled_and_harms_nobody(start: Callable[..., Worker]) -> None:
    def gone(delta: Delta) -> None:
        raise ConnectionError("the client went away")

    worker, other = start(engine()), Client()
    with capture_logs() as logs:
        worker.submit(ask_for("gone", max_tokens=40), gone)
        worker.submit(ask_for("other", max_tokens=20), other)
        assert other.reason is FinishReason.LENGTH
        assert worker.settle(PATIENCE_S)
    assert "deliver_failed" in {entry["event"] for entry in logs}
    expected = decode_one(engine(), ask_for("other", max_tokens=20))
    assert expected.tokens == other.answer().tokens


def test_an_observer_that_raises_harms_nobody(start: Callable[..., Worker]) -> None:
    class Broken:
        def on_admit(self, trace: Trace) -> None:
            raise OSError("disk full")

        on_tick = on_finish = on_admit

    notes, client = Notes(), Client()
    worker = start(engine(), Broken(), notes)
    with capture_logs() as logs:
        worker.submit(ask_for(max_tokens=5), client)
        assert client.reason is FinishReason.LENGTH
        assert worker.settle(PATIENCE_S)
    assert len(notes.finished) == 1
    assert {"observer_failed"} == {entry["event"] for entry in logs}


def test_a_failing_pass_reaches_the_clients_and_the_worker_lives_on(start: Callable[..., Worker]) -> None:
    e = engine()
    worker, bad, good = start(e), Client(), Client()
    large = e.tiers["large"].model
    large.error = RuntimeError("out of memory")
    with capture_logs():
        worker.submit(ask_for("bad", policy=Policy(), max_tokens=3), bad)
        assert bad.reason is FinishReason.ERROR
        assert worker.settle(PATIENCE_S)
    large.error = None
    worker.submit(ask_for("good", max_tokens=3), good)
    assert good.reason is FinishReason.LENGTH
    assert worker.kv_usage == 0.0


def test_when_the_engine_dies_everybody_is_told_and_nobody_is_admitted(start: Callable[..., Worker]) -> None:
    e, gate = gated(max_rows=1)
    notes = Notes()
    worker, clients = start(e, notes), [Client(), Client()]
    worker.submit(ask_for("running"), clients[0])
    assert gate.reached.wait(PATIENCE_S)
    worker.submit(ask_for("waiting"), clients[1])

    def bug(*_: object) -> None:
        raise KeyError("a bug in the engine")

    e.rounds.after = bug
    with capture_logs() as logs:
        gate.open.set()
        answers = [c.answer() for c in clients]
        worker.stop()
    assert {FinishReason.ERROR} == {a.finished.reason for a in answers}
    assert all("the engine stopped" in a.finished.error for a in answers)
    assert "engine_died" in {entry["event"] for entry in logs}
    assert {t.request.id for t in notes.finished} == {"running", "waiting"}
    assert not worker.ready
    assert worker.settle(PATIENCE_S)
    with pytest.raises(QueueFull):
        worker.submit(ask_for("late"), Client())


def test_stopping_lets_running_requests_finish(start: Callable[..., Worker]) -> None:
    e, gate = gated()
    worker, client = start(e), Client()
    worker.submit(ask_for("r", max_tokens=6), client)
    assert gate.reached.wait(PATIENCE_S)
    stopper = threading.Thread(target=worker.stop, args=(PATIENCE_S,))
    stopper.start()
    gate.open.set()
    stopper.join(PATIENCE_S)
    assert not stopper.is_alive()
    assert (client.reason, len(client.answer().tokens)) == (FinishReason.LENGTH, 6)
    assert not worker.ready
    with pytest.raises(QueueFull):
        worker.submit(ask_for("late"), Client())


def test_stopping_at_once_aborts(start: Callable[..., Worker]) -> None:
    e, gate = gated(max_rows=1)
    notes = Notes()
    worker, clients = start(e, notes), [Client(), Client()]
    worker.submit(ask_for("a", max_tokens=60, prompt=(1,)), clients[0])
    worker.submit(ask_for("b", max_tokens=60, prompt=(1,)), clients[1])
    assert gate.reached.wait(PATIENCE_S)
    stopper = threading.Thread(target=worker.stop)
    stopper.start()
    with worker._wake:
        assert worker._wake.wait_for(lambda: worker._cancelled, PATIENCE_S)
    gate.open.set()
    stopper.join(PATIENCE_S)
    assert {FinishReason.ABORT} == {c.reason for c in clients}
    assert len(notes.finished) == 2


def test_settle_waits_for_audits_and_gives_up_in_time(start: Callable[..., Worker]) -> None:
    e, gate = gated()
    notes, client = Notes(), Client()
    worker = start(e, notes)
    request = Request(
        **{
            **{f: getattr(ask_for("t"), f) for f in Request.__slots__},
            "policy": Policy(protect_first=0, accept=Accept.TRUST, threshold=0.0, lookup=False),
            "audited": True,
        }
    )
    worker.submit(request, client)
    client.answer()  # the small model wrote everything; the audit stands before the gate
    assert gate.reached.wait(PATIENCE_S)
    assert not worker.settle(0.01)
    gate.open.set()
    assert worker.settle(PATIENCE_S)
    assert notes.finished[0].audit == "complete"
    assert all(row.audit_source == "posthoc" for row in notes.tape["t", 0].output)


def test_submitting_while_cancelling_from_many_threads_loses_nobody(start: Callable[..., Worker]) -> None:
    worker = start(engine(max_rows=4), max_queue=1000)
    clients = {f"x{i}": Client() for i in range(60)}

    def client_life(number: int) -> None:
        for i in range(number, 60, 6):
            worker.submit(ask_for(f"x{i}", max_tokens=5, seed=i), clients[f"x{i}"])
            if i % 3 == 0:
                worker.cancel(f"x{i}")

    threads = [threading.Thread(target=client_life, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    reasons = [client.reason for client in clients.values()]
    assert set(reasons) <= {FinishReason.LENGTH, FinishReason.ABORT}
    assert reasons.count(FinishReason.LENGTH) >= 40
    assert worker.settle(PATIENCE_S)
    assert (worker.num_running, worker.kv_usage) == (0, 0.0)


def test_decoding_on_a_thread_changes_nothing(start: Callable[..., Worker]) -> None:
    request = ask_for("s", temperature=1.0, seed=9, max_tokens=20)
    client = Client()
    start(engine()).submit(request, client)
    assert decode(engine(), [request])["s", 0].tokens == client.answer().tokens
