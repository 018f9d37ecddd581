from __future__ import annotations

import re
from collections.abc import Iterator

from fake_worker import FakeWorker

from gateway.core import Sampling
from gateway.metrics import Metrics
from gateway.policy import Policy
from gateway.request import Request

NAMES = {
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "e2e_request_latency_seconds_count",
    "request_queue_time_seconds_count",
    "num_requests_running",
    "num_requests_waiting",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "kv_cache_usage_perc",
    "routing_decisions_total",
    "routing_score_count",
    "audit_agreement_ratio",
    "tape_queue_depth",
    "tape_dropped_total",
    "tape_flush_seconds_count",
}


def samples(metrics: Metrics) -> Iterator[tuple[str, str, float]]:
    """name, labels, value of every sample."""
    for line in metrics.exposition().decode().splitlines():
        if match := re.fullmatch(r"tokentape:(\w+)(\{.*\})? (\S+)", line):
            yield match[1], match[2] or "", float(match[3])


def served(num_tokens: int) -> Metrics:
    metrics = Metrics()
    metrics.watch_engine(lambda: 1, lambda: 2, lambda: 0.5)
    metrics.watch_tape(lambda: 3, lambda: {"queue_full": 7})
    metrics.on_flush(0.01)
    worker = FakeWorker([metrics])
    sampling = Sampling(max_tokens=num_tokens, seed=1)
    worker.submit(Request("r", 0, (1, 2), sampling, Policy(), "stable", 0.0), lambda delta: None)
    return metrics


def test_every_name_of_the_contract_is_there() -> None:
    assert set() == NAMES - {name for name, _, _ in samples(served(9))}


def test_counts() -> None:
    told = {(name, labels): value for name, labels, value in samples(served(9))}
    assert told["prompt_tokens_total", ""] == 2
    assert told["generation_tokens_total", '{tier="large"}'] == 3
    assert told["generation_tokens_total", '{tier="small"}'] == 6
    assert told["request_success_total", '{finished_reason="length"}'] == 1
    assert told["routing_decisions_total", '{action="keep",arm="stable",reason="confident"}'] == 6
    assert told["inter_token_latency_seconds_count", ""] == 8
    assert told["audit_agreement_ratio", '{arm="stable"}'] == 1
    assert told["tape_dropped_total", '{cause="queue_full"}'] == 7


def test_no_label_names_a_request_or_a_model() -> None:
    text = served(3).exposition().decode()
    labels = {name for group in re.findall(r"\{(.*?)\}", text) for name in re.findall(r"(\w+)=", group)}
    assert {"tier", "finished_reason", "arm", "action", "reason", "cause", "le"} >= labels


def test_nothing_is_kept_of_a_finished_choice() -> None:
    assert served(3)._watched == {}
