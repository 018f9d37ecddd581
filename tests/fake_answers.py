"""What the fake gateway says of metrics, advice, diagnosis, rollouts and alerts."""

from __future__ import annotations

from typing import Any

from fake_traces import NOW

METRICS = """\
tokentape:num_requests_running 2
tokentape:num_requests_waiting 1
tokentape:generation_tokens_total{tier="small"} 670
tokentape:generation_tokens_total{tier="large"} 330
tokentape:spec_decode_num_draft_tokens_total 800
tokentape:spec_decode_num_accepted_tokens_total 648
tokentape:tape_queue_depth 12
tokentape:kv_cache_usage_perc 0.41
tokentape:drift_evidence{metric="agreement"} 1.7
"""

ADVICE = {
    "curve": [
        {
            "threshold": t / 20,
            "kept_share": 0.95 - 0.04 * t,
            "agreement": 0.9 + 0.005 * t,
            "low": 0.88 + 0.0055 * t,
            "high": min(1, 0.92 + 0.0045 * t),
        }
        for t in range(21)
    ],
    "labels": 1204,
    "current": 0.5,
    "calibrated": 0.6,
    "since": NOW - 86400,
    "until": NOW,
}


FINDINGS = [
    {
        "cause": "threshold too loose",
        "share": 0.04,
        "of": "kept tokens",
        "limit": 0.02,
        "evidence": "48 of 1,204 labels disagree",
        "change": "raise threshold to 0.62",
    },
    {"cause": "loops", "share": None, "of": "tokens", "limit": 0.01, "evidence": "", "change": ""},
]

ROLLOUT = {
    "name": "looser",
    "verdict": "progressing",
    "paused": False,
    "weight": 0.05,
    "step": 0,
    "steps": [0.05, 0.25, 0.5],
    "units": {"stable": 812, "canary": 43},
    "canary": {"threshold": 0.4},
    "evidence": {
        "agreement": {"against": 6.2, "for": 1.4, "limit": 20.0},
        "guard_hits": {"against": 0.8, "for": 3.1, "limit": 20.0},
    },
    "unproven": ["agreement"],
    "history": [
        {"ts": NOW - 900, "event": "started", "weight": 0.05, "reason": "canary of threshold starts"},
    ],
}

ALERTS: dict[str, Any] = {
    "data": [
        {
            "name": "QualityDrift",
            "state": "firing",
            "since": NOW - 300,
            "labels": {"alertname": "QualityDrift"},
            "annotations": {"summary": "agreement fell <b>below</b> the baseline"},
            "silenced_by": [],
            "inhibited_by": [],
        }
    ],
    "silences": [],
    "history": [{"ts": NOW - 5000, "name": "TapeDropping", "state": "resolved", "annotations": {}}],
}

DELIVERIES = [
    {
        "id": "d1",
        "receiver": "oncall",
        "subject": "QualityDrift",
        "state": "failed",
        "created": NOW - 290,
        "attempts": 5,
        "status": 503,
        "error": None,
    },
]
