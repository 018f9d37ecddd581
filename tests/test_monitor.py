"""The monitor and its service: from the engine's rows to verdicts, alerts, deliveries; restarts."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pytest
from fakes import Clock
from tape_fakes import SERVED, finished, request, step
from tiny_pair import TinyPair

from alerts.answers import Answers, is_judged
from alerts.config import AlertsConfig
from alerts.drift import Drift
from alerts.evidence import DRIFT_LIMIT
from alerts.monitor import Monitor
from alerts.post import Answer
from alerts.rollout import arm_of
from alerts.service import AlertsService, FieldError, NotFound, WrongState
from alerts.store import Store
from gateway.core import (
    Accept,
    Action,
    AuditStatus,
    Counts,
    Delta,
    FinishReason,
    Mode,
    Outcome,
    Reason,
    Sampling,
    Step,
    Tick,
    Tier,
)
from gateway.policy import Policy
from gateway.request import Trace
from gateway.worker import Worker
from logs import schema

NUM_TOKENS = 8
ROLLOUT = {"name": "cheap", "canary": {"accept": "trust", "threshold": 0.0}, "steps": [0.5], "min_step_s": 0}


class House:
    """A gateway without an engine: a data folder, a tape, a clock, and receivers that remember."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.settings = settings
        self.clock = Clock(now=time.time())
        self.tape = duckdb.connect()
        schema.migrate(self.tape)
        self.posted: list[tuple[str, Any]] = []
        self.fail: list[int] = []
        self.samples: dict[Any, float] = {}
        self.random = random.Random(1)
        self.count = 0
        self.services: list[AlertsService] = []
        self.open()

    def open(self) -> None:
        """Start a gateway on what is on disk."""
        hook = {"name": "ops", "kind": "webhook", "url": "https://hooks.example/", "secret_env": "S"}
        config = {"interval_s": 1000.0, "receivers": [hook], **self.settings}
        self.service = AlertsService(
            config=msgspec.convert(config, AlertsConfig),
            data_dir=self.folder,
            cursor=self.tape.cursor,
            policies={"stable": Policy(), "fast": Policy(draft_length=9)},
            environ={"S": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"},
            base_url="http://gw",
            samples=lambda: self.samples,
            queue_limit=100,
            clock=self.clock,
        )
        self.service.webhooks._send = self._post
        self.monitor.start()
        self.services.append(self.service)

    @property
    def monitor(self) -> Monitor:
        return self.service.monitor

    def crash(self) -> None:
        """The process dies: nothing more is saved; then it starts again."""
        dead = self.monitor
        assert dead.flush()
        dead.save = lambda: None  # type: ignore[method-assign]
        dead.stop()
        self.open()

    def close(self) -> None:
        self.monitor.stop()

    def _post(self, url: str, content: bytes, headers: Any, **_: Any) -> Answer:
        status = self.fail.pop(0) if self.fail else 200
        self.posted.append((headers["webhook-id"], json.loads(content)))
        return Answer(status, None, "")

    def deliver(self) -> None:
        while self.service.webhooks.deliver_next("ops"):
            self.clock.now += 5

    def told(self) -> list[tuple[str, str]]:
        """(alert, status) of every distinct webhook-id, in order."""
        seen = dict(reversed(self.posted))
        ids = list(dict.fromkeys(id for id, _ in self.posted))
        alerts = [seen[id] for id in ids if not id.startswith("gate_")]
        return [(body["groupLabels"]["alertname"], body["status"]) for body in alerts]

    def serve(
        self,
        num: int,
        wrong: Callable[[str], float],
        user: Callable[[int], str | None] = lambda _: None,
        until_verdict: bool = False,
    ) -> list[str]:
        """Answer requests one by one; wrong: share of the small model's tokens the large one disagrees with.

        The arms they got.
        """
        arms = []
        for _ in range(num):
            self.count += 1
            self.clock.now += 0.5
            name = f"req-{self.count}"
            got = self.service.assign(name, user(self.count), None)
            arms.append(got.arm)
            self.answer(name, got.arm, got.policy, wrong(got.arm), user_hash=got.user_hash)
            if self.count % 10 == 0:
                assert self.monitor.flush()
                rollouts = self.service.rollouts()
                if until_verdict and rollouts[0]["verdict"] != "progressing":
                    break
        assert self.monitor.flush()
        return arms

    def answer(self, name: str, arm: str, policy: Policy, wrong: float, **fields: Any) -> None:
        asked = request(
            name, arm=arm, policy=policy, audited=self.random.random() < policy.audit_rate,
            received=self.clock.now, **fields,
        )  # fmt: skip
        observer = self.service.observer
        observer.on_admit(Trace(asked, SERVED))
        rows = [self.row(name, seq, policy, wrong) for seq in range(NUM_TOKENS)]
        observer.on_tick(Tick(1, steps=rows))
        num_right = sum(row.outcome is Outcome.ACCEPTED for row in rows)
        counts = Counts(
            small_tokens=10, large_tokens=10, num_draft_tokens=10, num_accepted_draft_tokens=num_right
        )
        now = self.clock.now
        end = finished(counts=counts, received=now, admitted=now, first_token=now + 0.1, finished=now + 0.4)
        audit = AuditStatus.COMPLETE if asked.audited else AuditStatus.NOT_CHOSEN
        observer.on_finish(Trace(asked, SERVED, end, audit))

    def row(self, name: str, seq: int, policy: Policy, wrong: float) -> Step:
        if seq < 4:
            return step(name, seq)
        agrees = self.random.random() >= wrong
        outcome = Outcome.KEPT if not policy.verified else Outcome.ACCEPTED if agrees else Outcome.REJECTED
        return step(
            name, seq, tier=Tier.SMALL, action=Action.KEEP, reason=Reason.CONFIDENT, score=0.9,
            threshold=policy.threshold, outcome=outcome, token_id=1, large_choice=1 if agrees else 2,
            p_large=0.9 if agrees else 0.1,
        )  # fmt: skip


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    built = House(tmp_path)
    yield built
    built.close()


def bad(arm: str) -> float:
    return 0.4 if arm == "canary" else 0.02


def same(_: str) -> float:
    return 0.02


# --- verdicts, end to end but for the models and the network ---


def test_a_bad_canary_is_rolled_back_and_told_once(house: House) -> None:
    started = house.service.start_rollout(ROLLOUT)
    assert started["verdict"] == "progressing"
    assert started["estimate"]["rollback_requests"] > 0
    house.fail = [500, 503]
    arms = house.serve(300, bad)
    rollout = house.service.rollout("cheap")
    assert rollout["verdict"] == "rolled_back"
    assert rollout["units"]["canary"] <= 100
    assert set(arms[:50]) == {"stable", "canary"}
    assert set(house.serve(100, bad)) == {"stable"}
    house.deliver()
    house.clock.now += 10
    house.deliver()
    house.clock.now += 10
    house.deliver()
    assert len(house.posted) == 3
    assert house.told() == [("CanaryRolledBack", "firing")]
    annotations = house.posted[0][1]["alerts"][0]["annotations"]
    assert annotations["rollout"] == "http://gw/v1/rollouts/cheap"
    worst = [annotations[f"trace_{i}"].removeprefix("http://gw/v1/traces/") for i in (1, 2, 3)]
    salt = rollout["salt"]
    assert [arm_of(salt, name, 0.5) for name in worst] == ["canary"] * 3
    on_tape = house.tape.execute("SELECT event, verdict FROM rollouts ORDER BY number").fetchall()
    assert on_tape == [("started", "progressing"), ("rolled_back", "rolled_back")]
    assert house.tape.execute("SELECT name, state FROM alerts").fetchall() == [("CanaryRolledBack", "firing")]
    house.clock.now += 4000
    assert house.monitor.flush()
    house.deliver()
    assert house.told() == [("CanaryRolledBack", "firing"), ("CanaryRolledBack", "resolved")]


@pytest.mark.parametrize("every", [7, 40])
def test_the_same_with_crashes_in_between(house: House, every: int) -> None:
    house.service.start_rollout(ROLLOUT)
    for _ in range(20):
        house.serve(every, bad)
        house.crash()
        house.deliver()
        if house.service.rollout("cheap")["verdict"] == "rolled_back":
            break
    rollout = house.service.rollout("cheap")
    assert rollout["verdict"] == "rolled_back"
    assert [entry["event"] for entry in rollout["history"]] == ["started", "rolled_back"]
    assert set(house.serve(50, bad)) == {"stable"}
    house.deliver()
    assert house.told() == [("CanaryRolledBack", "firing")]
    assert house.tape.execute("SELECT count(*) FROM rollouts").fetchone() == (2,)


def test_a_crash_between_deciding_and_telling_tells_afterwards_once(house: House) -> None:
    house.service.start_rollout(ROLLOUT)
    house.service.webhooks.notify = lambda *_: (_ for _ in ()).throw(OSError("disk full"))  # type: ignore[method-assign]
    house.serve(300, bad)
    house.deliver()
    assert house.posted == []
    house.crash()
    house.deliver()
    house.crash()
    house.deliver()
    assert house.told() == [("CanaryRolledBack", "firing")]
    assert len(house.posted) == 1


def test_changes_of_alerts_survive_a_tape_that_refuses_and_a_crash(house: House) -> None:
    house.service.start_rollout(ROLLOUT)

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    house.monitor._store.put_alerts = refuse  # type: ignore[method-assign]
    house.serve(300, bad, until_verdict=True)
    house.crash()
    house.crash()
    house.clock.now += 1
    house.service.start_rollout({**ROLLOUT, "name": "next"})
    house.crash()
    history = house.service.alerts()["history"]
    # Newest first; each change once, as it was then.
    assert [(change["name"], change["state"]) for change in history] == [
        ("CanaryRolledBack", "resolved"),
        ("CanaryRolledBack", "firing"),
    ]


def test_a_tape_that_refuses_does_not_stop_the_start(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("disk full")

    house.service.start_rollout(ROLLOUT)
    with monkeypatch.context() as patched:
        patched.setattr(Store, "put_alerts", refuse)
        house.serve(300, bad, until_verdict=True)
        house.crash()
        assert house.service.rollout("cheap")["verdict"] == "rolled_back"
    assert house.monitor.flush()
    house.deliver()
    assert house.told() == [("CanaryRolledBack", "firing")]


def test_a_good_canary_is_promoted_and_stays_after_a_restart(house: House) -> None:
    house.service.start_rollout({**ROLLOUT, "canary": {"threshold": 0.4}, "alpha": 0.3})
    house.serve(1600, same, until_verdict=True)
    assert house.service.rollout("cheap")["verdict"] == "promoted"
    assert house.service.stable == Policy(threshold=0.4)
    house.crash()
    assert house.service.stable == Policy(threshold=0.4)
    assert house.service.promoted is not None
    assert house.service.promoted["rollout"] == "cheap"
    assert house.service.assign("x", None, None).policy == Policy(threshold=0.4)
    house.deliver()
    assert house.told() == [("CanaryPromoted", "firing")]


def test_aa_raises_nothing_but_the_promotion(house: House) -> None:
    house.service.start_rollout({**ROLLOUT, "canary": {}})
    house.serve(400, same, user=lambda i: f"u{i % 500}" if i % 3 else None)
    house.deliver()
    assert {name for name, _ in house.told()} <= {"CanaryPromoted"}
    assert house.service.rollout("cheap")["verdict"] in ("progressing", "promoted")


def test_a_restart_keeps_everything_as_it_was(house: House) -> None:
    house.service.start_rollout({**ROLLOUT, "steps": [0.3, 0.6], "min_units": 40})
    house.serve(150, same, user=lambda i: f"u{i % 60}")
    house.service.pause("cheap")
    house.service.add_silence({"matchers": {"alertname": "X"}, "author": "ana", "duration_s": 1e5})
    before = house.service.rollout("cheap"), house.service.alerts()
    arms = [house.service.assign(str(i), f"u{i}", None).arm for i in range(60)]
    house.crash()
    assert (house.service.rollout("cheap"), house.service.alerts()) == before
    assert [house.service.assign(str(i), f"u{i}", None).arm for i in range(60)] == arms


def test_the_gate_vetoes(tmp_path: Path) -> None:
    house = House(tmp_path, gate="ops")
    house.fail = [403]
    house.service.start_rollout({**ROLLOUT, "canary": {"threshold": 0.4}, "alpha": 0.3})
    house.serve(1600, same, until_verdict=True)
    rollout = house.service.rollout("cheap")
    assert (rollout["verdict"], rollout["paused"]) == ("inconclusive", True)
    assert "403" in rollout["history"][-1]["reason"]
    assert house.service.stable == Policy()
    house.deliver()
    assert house.told()[-1] == ("CanaryInconclusive", "firing")
    house.close()


def test_people_decide(house: House) -> None:
    service = house.service
    service.start_rollout(ROLLOUT)
    with pytest.raises(WrongState, match="active"):
        service.start_rollout({**ROLLOUT, "name": "other"})
    assert service.pause("cheap")["paused"]
    assert not service.resume("cheap")["paused"]
    assert service.abort("cheap")["verdict"] == "aborted"
    with pytest.raises(WrongState, match="ended"):
        service.promote("cheap")
    with pytest.raises(NotFound):
        service.pause("nothing")
    service.start_rollout({**ROLLOUT, "name": "other", "canary": {"policy": "fast", "threshold": 0.1}})
    assert service.promote("other")["weight"] == 1.0
    assert service.stable == Policy(draft_length=9, threshold=0.1)
    with pytest.raises(WrongState):
        service.abort("cheap")
    assert [r["name"] for r in service.rollouts()] == ["other", "cheap"]
    with pytest.raises(NotFound):
        service.delete_silence("nothing")
    with pytest.raises(NotFound):
        service.redeliver("nothing")


@pytest.mark.parametrize(
    ("canary", "param"),
    [
        ({"threshold": 2}, "canary.threshold"),
        ({"threshold": "high"}, "canary.threshold"),
        ({"treshold": 0.5}, "canary.treshold"),
        ({"accept": "hope"}, "canary.accept"),
        ({"policy": "nobody"}, "canary.policy"),
        ({"policy": 3}, "canary.policy"),
        ({"large_token_budget": 50}, "canary.large_token_budget"),
    ],
)
def test_a_canary_that_is_no_policy(house: House, canary: dict[str, Any], param: str) -> None:
    with pytest.raises(FieldError) as caught:
        house.service.start_rollout({**ROLLOUT, "canary": canary})
    assert caught.value.param == param
    assert house.service.rollouts() == []


def test_the_arm_follows_user_then_header_then_request(house: House) -> None:
    salt = house.service.start_rollout(ROLLOUT)["salt"]
    for i in range(30):
        for user, header, key in ((f"u{i}", "h", f"u{i}"), (None, f"h{i}", f"h{i}"), (None, None, f"r{i}")):
            got = house.service.assign(f"r{i}", user, header)
            assert got.arm == arm_of(salt, key, 0.5)
            if got.arm == "canary":
                assert (got.policy.accept, got.policy.audit_rate) == (Accept.TRUST, 1.0)
                assert got.policy_name == "cheap"
            else:
                assert (got.policy, got.policy_name) == (Policy(), "stable")


def test_own_routing_forks_and_later_choices_are_no_evidence(house: House) -> None:
    house.service.start_rollout(ROLLOUT)
    for i, fields in enumerate(
        ({"params": {"routing": {"threshold": 0.1}}}, {"parent": "p", "forked_at": 3}, {"choice": 1})
    ):
        house.answer(f"r{i}", "canary", Policy(), 0.5, **fields)
    assert house.monitor.flush()
    assert house.service.rollout("cheap")["units"] == {"stable": 0, "canary": 0}


def test_scores_are_evidence_once(house: House) -> None:
    house.service.start_rollout({**ROLLOUT, "min_step_s": 1e6})
    house.serve(40, same)
    for i in range(1, 41):
        for _ in range(2):
            house.service.score(f"req-{i}", "solved", 1.0)
    house.service.score("unknown", "solved", 0.0)
    assert house.monitor.flush()
    counted = house.service.rollout("cheap")["evidence"]["score:solved"]["units"]
    assert counted["stable"] + counted["canary"] == 40


# --- without a canary ---


def test_drift_of_stable_traffic(house: House) -> None:
    house.serve(400, same)
    assert house.service.alerts()["data"] == []
    house.serve(300, lambda _: 0.5)
    (alert, *_) = house.service.alerts()["data"]
    assert (alert["name"], alert["state"]) == ("QualityDrift", "firing")
    house.deliver()
    assert house.told()[0] == ("QualityDrift", "firing")


def test_drift_starts_anew_under_a_new_policy() -> None:
    drift = Drift("a")
    good = {"agreement": 1.0, "mean_logp_large": -0.1, "guard_hits": 0.0, "errors": 0.0}
    for _ in range(200):
        drift.observe(good, judged=True)
    for _ in range(100):
        drift.observe({**good, "errors": 1.0}, judged=True)
    assert drift.evidence["errors"] >= DRIFT_LIMIT
    assert drift.evidence["agreement"] == pytest.approx(1 - 0.4 * 0.08)
    copy = Drift.from_dict(json.loads(json.dumps(drift.to_dict())))
    assert copy.evidence == drift.evidence


def test_rules_see_served_metrics_and_own_ones(tmp_path: Path) -> None:
    rule = {"name": "Canarying", "kind": "threshold", "metric": "tokentape:canary_weight", "value": 0.4}
    house = House(tmp_path, rules=[rule])
    house.samples[("tokentape:num_requests_waiting", ())] = 5.0
    assert house.monitor.flush()
    assert house.service.alerts()["data"] == []
    house.service.start_rollout(ROLLOUT)
    assert [alert["name"] for alert in house.service.alerts()["data"]] == ["Canarying"]
    names = {name for name, _ in house.service.samples()}
    assert names == {
        "tokentape:canary_weight", "tokentape:drift_evidence", "tokentape:alert_deliveries_total"
    }  # fmt: skip
    house.close()


# --- the observer ---


def test_the_engines_thread_never_waits(house: House) -> None:
    """Whatever the monitor is busy with, handing over rows and assigning arms goes on."""
    house.service.start_rollout(ROLLOUT)
    done = threading.Event()

    def engine() -> None:
        for i in range(50):
            got = house.service.assign(f"e{i}", None, None)
            house.answer(f"e{i}", got.arm, got.policy, 0.1)
        done.set()

    with house.monitor.lock:
        thread = threading.Thread(target=engine)
        thread.start()
        assert done.wait(5)
    thread.join()
    assert house.monitor.flush()
    assert sum(house.service.rollout("cheap")["units"].values()) > 40


def test_rows_beyond_the_bound_are_counted_and_their_answers_are_missing(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.service.start_rollout(ROLLOUT)
    with house.monitor.lock:
        monkeypatch.setattr("alerts.intake.MOST_QUEUED_ROWS", 5)
        house.answer("lost", "canary", house.service.stable, 0.0)
    assert house.service.observer.dropped_rows == NUM_TOKENS
    assert house.monitor.flush()
    assert house.service.rollout("cheap")["evidence"]["agreement"]["missing"] == {"stable": 0, "canary": 1}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"drift": 3}', '{"canaries": {}, "alerts": {}}'])
def test_a_damaged_state_is_set_aside_and_serving_goes_on(tmp_path: Path, text: str) -> None:
    (tmp_path / "alerts.json").write_text(text)
    house = House(tmp_path)
    house.service.start_rollout(ROLLOUT)
    assert (tmp_path / "alerts.json.damaged").read_text() == text
    house.close()


def test_a_damaged_promoted_policy_falls_back_to_the_config(tmp_path: Path) -> None:
    (tmp_path / "promoted_policy.json").write_text('{"policy": {"mode": "routed", "accept": "hope"}}')
    house = House(tmp_path)
    assert house.service.stable == Policy()
    house.close()


# --- what an answer says ---


def values(
    rows: list[Step],
    policy: Policy,
    counts: Counts,
    reason: FinishReason = FinishReason.STOP,
    audit: AuditStatus = AuditStatus.NOT_CHOSEN,
    restated: tuple[Step, ...] = (),
    **times: Any,
) -> dict[str, float | None]:
    answers = Answers()
    asked = request("r", policy=policy, audited=audit is not AuditStatus.NOT_CHOSEN)
    answers.admit(asked)
    for row in (*rows, *restated):
        answers.step(row)
    answer = answers.finish(Trace(asked, SERVED, finished(reason, counts, **times), audit))
    assert answer is not None
    assert len(answers) == 0
    return dict(answer.values)


def small(seq: int, agrees: bool | None, outcome: Outcome, p: float | None = 0.5) -> Step:
    choice = None if agrees is None else 7 if agrees else 8
    return step("r", seq, tier=Tier.SMALL, outcome=outcome, token_id=7, large_choice=choice, p_large=p)


def test_agreement_counts_first_proposals_over_all_output_tokens() -> None:
    rows = [
        step("r", 0), small(1, True, Outcome.ACCEPTED), small(2, False, Outcome.REJECTED),
        step("r", 3, outcome=Outcome.RECOVERED), small(4, None, Outcome.DISCARDED),
        small(5, False, Outcome.ACCEPTED),
    ]  # fmt: skip
    got = values(
        rows,
        Policy(),
        Counts(small_tokens=2, large_tokens=2, num_draft_tokens=4, num_accepted_draft_tokens=2),
    )
    assert got["agreement"] == pytest.approx(1 - 2 / 4)
    assert got["acceptance"] == pytest.approx(0.5)


def test_trusted_tokens_are_judged_by_their_audit() -> None:
    trust = Policy(accept=Accept.TRUST)
    rows = [small(i, None, Outcome.KEPT, None) for i in range(4)]
    audited = tuple(small(i, i != 2, Outcome.KEPT, 0.5) for i in range(4))
    counts = Counts(small_tokens=4)
    full = values(rows, trust, counts, audit=AuditStatus.COMPLETE, restated=audited)
    assert full["agreement"] == pytest.approx(0.75)
    assert full["mean_logp_large"] == pytest.approx(-0.6931, abs=1e-4)
    # A lost audit is missing; a client that left costs only the tokens nobody looked at.
    assert values(rows, trust, counts, audit=AuditStatus.LOST, restated=audited[:3])["agreement"] is None
    left = values(rows, trust, counts, FinishReason.ABORT, AuditStatus.LOST, restated=audited[:2])
    assert left["agreement"] == pytest.approx(0.5)


def test_errors_and_empty_answers() -> None:
    failed = values([], Policy(), Counts(), FinishReason.ERROR)
    assert failed["errors"] == 1.0
    assert all(failed[name] is None for name in ("agreement", "mean_logp_large", "ttft", "tokens_per_s"))
    left = values([], Policy(), Counts(), FinishReason.ABORT, first_token=None, finished=1009.0)
    assert (left["agreement"], left["ttft"], left["tokens_per_s"], left["errors"]) == (1.0, 9.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("policy", "audited", "judged"),
    [
        (Policy(), False, True),
        (Policy(accept=Accept.TRUST), False, False),
        (Policy(accept=Accept.TRUST), True, True),
        (Policy(mode=Mode.SMALL_ONLY), False, False),
        (Policy(mode=Mode.LARGE_ONLY), False, True),
        (Policy(accept=Accept.THRESHOLD, large_token_budget=20), False, False),
    ],
)
def test_who_is_judged_is_known_at_admission(policy: Policy, audited: bool, judged: bool) -> None:
    assert is_judged(replace(request(), policy=policy, audited=audited)) is judged


# --- on the `tiny` pair ---


class Tiny:
    """The real engine on the `tiny` models with the service watching; no HTTP."""

    def __init__(self, pair: TinyPair, house: House) -> None:
        self.pair, self.house = pair, house
        self.random = random.Random(7)
        self.count = 0

    def serve(self, num: int, tokens: int = 24, together: int = 16) -> list[str]:
        """Answer num requests, `together` at a time; the arms they got."""
        service = self.house.service
        worker = Worker(self.pair.engine(), SERVED, (service.observer,), max_queue=1000)
        worker.start()
        places, arms = threading.Semaphore(together), []

        def deliver(delta: Delta) -> None:
            if delta.finished is not None:
                places.release()

        for _ in range(num):
            self.count += 1
            name = f"tiny-{self.count}"
            places.acquire()
            got = service.assign(name, None, None)
            arms.append(got.arm)
            asked = request(
                name, arm=got.arm, policy=got.policy, received=time.time(),
                prompt_ids=tuple(self.pair.tokenizer.encode(f"Question {self.random.random()}")),
                sampling=Sampling(max_tokens=tokens, seed=self.count, temperature=0.0),
                audited=self.random.random() < got.policy.audit_rate,
            )  # fmt: skip
            worker.submit(asked, deliver)
        worker.stop(drain_s=60)
        assert service.monitor.flush()
        return arms


@pytest.mark.parametrize("restart", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_on_tiny_a_canary_that_trusts_everything_is_rolled_back(
    tiny_pair: TinyPair, house: House, restart: bool
) -> None:
    house.clock.step = 0.0
    house.fail = [500, 500]
    served = Tiny(tiny_pair, house)
    house.service.start_rollout(
        {**ROLLOUT, "canary": {"accept": "trust", "threshold": 0.0, "protect_first": 0}}
    )
    for _ in range(12):
        served.serve(25, tokens=10)
        house.clock.now += 5
        house.deliver()
        if house.service.rollout("cheap")["verdict"] == "rolled_back":
            break
        if restart:
            house.crash()
    rollout = house.service.rollout("cheap")
    assert rollout["verdict"] == "rolled_back"
    assert rollout["evidence"]["agreement"]["against"] > 20
    assert set(served.serve(25, tokens=8)) == {"stable"}
    for _ in range(4):
        house.clock.now += 10
        house.deliver()
    assert house.told() == [("CanaryRolledBack", "firing")]
    assert len(house.posted) == 3


@pytest.mark.soak
def test_on_tiny_aa_raises_nothing_but_the_promotion(tiny_pair: TinyPair, house: House) -> None:
    house.service.start_rollout({**ROLLOUT, "canary": {}})
    served = Tiny(tiny_pair, house)
    for _ in range(40):
        served.serve(50)
        house.clock.now += 5
    house.deliver()
    assert served.count == 2000
    assert house.told() in ([], [("CanaryPromoted", "firing")])
