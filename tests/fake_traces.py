"""Routed decoding without models: what the tape would hold of one answer, decided by gateway.policy."""

from __future__ import annotations

import base64
import math
import random
from dataclasses import asdict
from typing import Any

from gateway.core import Accept, Action, Signals
from gateway.policy import History, Policy, decide, decide_early, f32

TEXT = (
    "Here is a Python function that merges two sorted lists:\n\n```python\ndef merge(a, b):\n"
    "    out, i, j = [], 0, 0\n    while i < len(a) and j < len(b):\n        if a[i] <= b[j]:\n"
    "            out.append(a[i])\n            i += 1\n        else:\n            out.append(b[j])\n"
    "            j += 1\n    return out + a[i:] + b[j:]\n```\n\nIt walks both lists once, so it needs "
    "len(a) + len(b) steps. 你好 — naïve café 😀.\n"
)
NOW = 1_796_068_800.0


def pieces(text: str) -> list[bytes]:
    """Words with their leading space, symbols alone, and every character beyond ASCII cut into bytes."""
    out: list[bytes] = []
    word = b""
    for char in text:
        raw = char.encode()
        if len(raw) > 1:
            out += [word] if word else []
            out += [raw[:2], raw[2:]] if len(raw) > 2 else [raw]
            word = b""
        elif char.isalnum() or (char == " " and not word.strip()):
            word += raw
        elif char == " ":
            out.append(word)
            word = raw
        else:
            out += [word, raw] if word else [raw]
            word = b""
    return out + ([word] if word else [])


class Vocabulary:
    """Ids for byte strings, handed out as they are first seen."""

    def __init__(self) -> None:
        self.ids: dict[bytes, int] = {}
        self.tokens: list[bytes] = []

    def __getitem__(self, token: bytes) -> int:
        if token not in self.ids:
            self.ids[token] = len(self.tokens)
            self.tokens.append(token)
        return self.ids[token]


VOCABULARY = Vocabulary()
OTHERS = [b" the", b" combines", b" takes", b" a", b"\n", b" list", b" of", b"(", b" value", b" joins"]


def topk(rng: random.Random, best: int, p: float) -> tuple[list[int], list[float]]:
    """Five ids and log-probabilities with `best` first at probability p."""
    ids, rest = [best], 1 - p
    logprobs = [math.log(p)]
    for other in rng.sample(OTHERS, 5):
        if VOCABULARY[other] != best and len(ids) < 5:
            rest *= 0.55
            ids.append(VOCABULARY[other])
            logprobs.append(math.log(max(min(rest * 0.6, logprobs and math.exp(logprobs[-1])), 1e-6)))
    return ids, logprobs


def simulate(tokens: list[bytes], policy: Policy, seed: int = 0) -> dict[str, list[Any]]:
    """Steps of one choice whose large model writes `tokens` and whose small model errs where it is unsure."""
    rng = random.Random(seed)
    want = [VOCABULARY[t] for t in tokens]
    proposals = []
    for y in want:
        sure = rng.random() < 0.72
        gap = f32(rng.uniform(0.55, 0.999) if sure else rng.uniform(0.0, 0.6))
        right = rng.random() < (0.985 if gap > 0.5 else 0.6)
        x = y if right else VOCABULARY[rng.choice(OTHERS)]
        proposals.append((x, gap))
    history = History(policy)
    rows: list[dict[str, Any]] = []
    clock, tick, round_ = NOW, 0, 0

    def row(idx: int, state: Any, decision: Any, token: int, tier: str, outcome: str, **more: Any) -> None:
        nonlocal clock
        x, gap = proposals[idx]
        top1 = f32((1 + gap) / 2)
        ids, logprobs = topk(random.Random(seed * 7919 + idx), x, max(top1, 0.3))
        large_ids, large_logprobs = topk(
            random.Random(seed * 31 + idx), want[idx], 0.93 if x == want[idx] else 0.71
        )
        latency = rng.randint(3000, 12000) if tier == "small" else rng.randint(30000, 70000)
        clock += latency / 1e6
        p_large = math.exp(dict(zip(large_ids, large_logprobs, strict=True)).get(token, -7.0))
        rows.append(
            {
                "request_id": "",
                "choice": 0,
                "idx": idx,
                "seq": len(rows),
                "round": round_,
                "draft_pos": state.draft_pos,
                "tick": tick,
                "token_id": token,
                "token_bytes": base64.b64encode(VOCABULARY.tokens[token]).decode(),
                "tier": tier,
                "action": decision and str(decision.action),
                "reason": decision and str(decision.reason),
                "score": decision and decision.score,
                "threshold": f32(policy.threshold),
                "top1_p": top1,
                "gap": gap,
                "entropy": f32((1 - gap) * 2.1),
                "attn_entropy": None,
                "run_length": state.run_length,
                "ema_acceptance": state.ema_acceptance,
                "draft_limit": state.draft_limit,
                "guard_value": state.guard_value,
                "large_used": state.large_used,
                "probe_u": None,
                "propensity": None,
                "small_choice": x,
                "small_topk_ids": ids,
                "small_topk_logprobs": logprobs,
                "large_topk_ids": large_ids,
                "large_topk_logprobs": large_logprobs,
                "p_large": f32(p_large),
                "large_choice": want[idx],
                "outcome": outcome,
                "audit_agrees": token == want[idx],
                "audit_source": "verify",
                "pass_id": tick,
                "batch_rows": 1,
                "small_kv": 40 + idx,
                "large_kv": 40 + idx,
                "latency_us": latency,
                "ts": clock,
                **more,
            }
        )

    trust = policy.accept is Accept.TRUST
    while history.num_written < len(tokens):
        tick += 1
        drafts: list[tuple[Any, ...]] = []
        while True:
            idx = len(history.tokens)
            if idx >= len(tokens):
                state, decision = None, None
                break
            x, gap = proposals[idx]
            state = history.state(x, policy.draft_length)
            signals = Signals(f32((1 + gap) / 2), gap, f32((1 - gap) * 2.1))
            decision = decide_early(policy, state) or decide(policy, state, signals)
            if decision.action is Action.DEFER:
                break
            if trust:
                history.keep(x)
                row(idx, state, decision, x, "small", "kept", audit_source="catchup")
            else:
                history.draft(x)
                drafts.append((idx, state, decision, x))
        good = 0
        while good < len(drafts) and drafts[good][3] == want[drafts[good][0]]:
            good += 1
        for place, (idx, at, how, x) in enumerate(drafts):
            outcome = "accepted" if place < good else "rejected" if place == good else "discarded"
            row(idx, at, how, x, "small", outcome)
        if good < len(drafts):
            if (
                decision is not None
                and decision.reason in {"low_confidence", "loop_guard"}
                and state is not None
            ):
                row(state.idx, state, decision, proposals[state.idx][0], "small", "discarded")
            idx, at, _, _ = drafts[good]
            history.resolve(good, want[idx])
            row(idx, at, None, want[idx], "large", "recovered")
        elif state is not None:
            history.resolve(good, want[state.idx])
            row(
                state.idx,
                state,
                decision,
                want[state.idx],
                "large",
                "bonus" if decision.reason == "draft_full" else "large",
            )
        else:
            history.resolve(good, None)
        round_ += 1
    return {name: [r[name] for r in rows] for name in rows[0]} if rows else {}


def summary(trace_id: str, columns: dict[str, list[Any]], policy: Policy, **more: Any) -> dict[str, Any]:
    """The trace's row of `requests`, in the tape's column names, counted from its steps."""
    out = [i for i, o in enumerate(columns["outcome"]) if o not in {"rejected", "discarded"}]
    tiers = [columns["tier"][i] for i in out]
    outcomes = columns["outcome"]
    drafted = sum(o in {"accepted", "rejected", "discarded"} for o in outcomes)
    accepted = outcomes.count("accepted")
    gaps = [columns["gap"][i] for i in out]
    stride = max(1, math.ceil(len(gaps) / 32))
    chunks = [gaps[i : i + stride] for i in range(0, len(gaps), stride)]
    first, last = columns["ts"][0], columns["ts"][-1]
    text = b"".join(base64.b64decode(columns["token_bytes"][i]) for i in out).decode("utf-8", "replace")
    return {
        "request_id": trace_id,
        "id": trace_id,
        "choice": 0,
        "endpoint": "/v1/chat/completions",
        "model": "tiny",
        "arm": "stable",
        "policy_name": "stable",
        "policy_hash": policy.hash,
        "policy": {k: str(v) if k in {"mode", "accept"} else v for k, v in asdict(policy).items()},
        "seed": 7,
        "sampling": {"temperature": 0.0, "max_tokens": 256},
        "params": {},
        "prompt_ids": [1, 2, 3],
        "prompt_text": "<|im_start|>user\nWrite a merge.<|im_end|>\n<|im_start|>assistant\n",
        "prompt_preview": "Write a function that merges two sorted lists.",
        "prompt_tokens": 24,
        "num_topk": 5,
        "parent": None,
        "forked_at": None,
        "small_model": "small",
        "large_model": "large",
        "numerics": "cpu/float32/none",
        "received": first - 0.4,
        "admitted": first - 0.3,
        "first_token": first,
        "finished": last,
        "finish_reason": "stop",
        "answer_text": text,
        "completion_tokens": len(out),
        "small_tokens": tiers.count("small"),
        "large_tokens": tiers.count("large"),
        "lookup_tokens": 0,
        "protected_tokens": columns["reason"].count("protected_prefix"),
        "num_drafts": max(columns["round"]) + 1,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
        "guard_hits": columns["reason"].count("loop_guard"),
        "large_passes": max(columns["round"]) + 1,
        "small_passes": len(outcomes),
        "deferral_rate": tiers.count("large") / max(len(out), 1),
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "mean_acceptance_length": None,
        "min_gap": min(gaps),
        "gap_spark": [sum(c) / len(c) for c in chunks],
        "audited_tokens": len(out),
        "audit_agreements": len(out),
        "audit_status": "complete",
        "capture": "full",
        "incomplete": False,
        "interrupted": False,
        "reviews": [],
        **more,
    }
