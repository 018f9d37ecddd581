"""Diagnose finds the cause that was put there, with its share."""

from dataclasses import replace

import pytest
from msgspec import structs
from tape_fakes import SERVED, finished, passed, request, step

from gateway.core import Action, Counts, Outcome, Reason, Signals, Tick, Tier
from gateway.policy import Policy
from gateway.request import Trace
from logs.diagnose import diagnose
from logs.reader import TraceFilter
from logs.recorder import Recorder

FINE = Counts(
    small_tokens=60, large_tokens=40, protected_tokens=10, num_drafts=20, num_draft_tokens=70,
    num_accepted_draft_tokens=60, large_passes=40, small_passes=80,
)  # fmt: skip


@pytest.fixture
def tape(tmp_path):
    recorder = Recorder(tmp_path, flush_s=3600.0)
    yield Tape(recorder)
    recorder.close()


class Tape:
    def __init__(self, recorder):
        self.recorder = recorder

    def put(self, id="r", steps=(), passes=(), arm="stable", **changes):
        """A finished request: 0.1 s in the queue, 1 s running, unless told otherwise."""
        times = {"received": 1000.0, "admitted": 1000.1, "finished": 1001.1}
        times |= {name: changes.pop(name) for name in list(changes) if name in times}
        end = finished(counts=replace(FINE, **changes), **times)
        trace = Trace(request(id, arm=arm, prompt_ids=(1,) * 50, received=times["received"]), SERVED)
        self.recorder.on_admit(trace)
        self.recorder.on_tick(Tick(0, None, [], [structs.replace(s, request_id=id) for s in steps]))
        for p in passes:
            self.recorder.on_tick(Tick(0, replace(p, ts=1000.5)))
        self.recorder.on_finish(replace(trace, finished=end))

    def finding(self, cause, policy=None, filters=None):
        found = {f.cause: f for f in diagnose(self.recorder.reader(), policy or Policy(), filters)}
        return found[cause]


def kept(seq, gap, agrees, **fields):
    given = {"tier": Tier.SMALL, "action": Action.KEEP, "reason": Reason.CONFIDENT, "score": gap}
    outcome = Outcome.ACCEPTED if agrees else Outcome.REJECTED
    given |= {"outcome": outcome, "signals": Signals(0.9, gap, 0.1), "audit_agrees": agrees}
    return step("r", seq, **(given | fields))


def test_an_empty_tape_has_nothing_to_say(tape):
    assert diagnose(tape.recorder.reader(), Policy()) == []


def test_a_loose_threshold_is_measured_and_a_better_one_named(tape):
    steps = [kept(i, 0.5, i % 2 == 0) for i in range(40)] + [kept(40 + i, 0.75, True) for i in range(60)]
    tape.put(steps=steps)

    found = tape.finding("threshold_too_loose", Policy(threshold=0.25))

    assert (found.share, found.noticed) == (pytest.approx(0.2), True)
    assert "threshold to 0.52" in found.change
    assert tape.finding("threshold_too_loose", Policy(threshold=0.625)).share == 0.0


def test_without_labels_it_says_so(tape):
    tape.put()

    found = tape.finding("threshold_too_loose")

    assert (found.share, found.noticed) == (None, False)
    assert "audit_rate" in found.change


def test_requests_the_small_model_is_unfit_for(tape):
    tape.put("good")
    tape.put("bad", num_accepted_draft_tokens=10)

    assert tape.finding("small_model_unfit").share == 0.5
    assert tape.finding("small_model_unfit", filters=TraceFilter(q="good")).share == 0.0


def test_tokens_deferred_for_want_of_confidence(tape):
    unsure = {"reason": Reason.LOW_CONFIDENCE, "score": 0.125}
    tape.put(
        steps=[step("r", i, **unsure) for i in range(45)]
        + [step("r", 45, outcome=Outcome.DISCARDED, **unsure)]
    )

    assert tape.finding("task_too_hard").share == 0.45


def test_short_answers_and_loops(tape):
    tape.put(protected_tokens=50, guard_hits=3)

    assert (tape.finding("answers_too_short").share, tape.finding("loops").share) == (0.5, 0.03)


def test_time_outside_the_models(tape):
    tape.put(passes=[passed(0, ms=6.0, host_ms=2.0), passed(1, tier=Tier.SMALL, ms=3.0, host_ms=1.0)])

    assert tape.finding("router_overhead").share == 0.25


def test_large_passes_that_leave_running_requests_out(tape):
    # Four requests run for a second each while the engine is busy for one: four run at a time.
    for i in range(4):
        tape.put(f"r{i}", passes=[passed(i, rows=1, ms=250.0, host_ms=0.0)])

    assert tape.finding("batching_not_effective").share == pytest.approx(0.75)


def test_tokens_read_more_than_once(tape):
    # 50 of the prompt, 100 of the answer and 10 rejected drafts are needed.
    tape.put(passes=[passed(0, tokens=320)])

    assert tape.finding("cache_churn").share == 0.5


def test_time_in_the_queue(tape):
    tape.put(received=1000.0, admitted=1001.0, finished=1004.0)

    assert tape.finding("queue").share == 0.25


def test_time_in_which_no_pass_carries_the_request(tape):
    # 40 large passes of 10 ms and 80 small ones of 2.5 ms are 0.6 of the running second.
    tape.put(passes=[passed(0, ms=10.0), passed(1, tier=Tier.SMALL, ms=2.5)])

    assert tape.finding("waiting_on_decisions").share == pytest.approx(0.4)


def test_the_most_pressing_comes_first(tape):
    tape.put(protected_tokens=90, steps=[kept(i, 0.75, True) for i in range(10)])

    found = diagnose(tape.recorder.reader(), Policy())

    assert found[0].cause == "answers_too_short"
    assert [f.cause for f in found if f.noticed] == ["answers_too_short"]
    assert all(f.evidence and f.change for f in found)
