"""The step panel: one step's token, rules, both models' top tokens and numbers, as escaped HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

from gateway.policy import Policy
from replay_ui.pieces import alone, prose
from replay_ui.rules import Verdict, verdict
from replay_ui.steps import Steps
from replay_ui.view import DASH, markup, number

OUTCOMES = {
    "kept": "kept without being checked",
    "accepted": "drafted, and the large model let it stand",
    "recovered": "the large model's token after it rejected a draft",
    "bonus": "one token more of the large model's, from the same pass",
    "large": "left to the large model",
    "forced": "given with the fork, not decoded",
    "rejected": "drafted, and a stronger model refused it",
    "discarded": "drafted, but never examined: an earlier draft was refused or the answer had ended",
}


VERDICTS = {
    "accepted": "let the draft stand",
    "rejected": "refused the draft",
    "recovered": "refused the draft and put its own token",
    "bonus": "added its own token after a full draft",
    "own": "was asked, as the tier below deferred",
    "passed": "passed on without being asked",
}
"""What a middle tier made of a position."""


def shown_ids(steps: Steps, position: int) -> list[int]:
    """Ids of the tokens that the panel names at position."""
    row = steps.row(position)
    views = row.get("middle") or []
    ids = [*(row.get("small_topk_ids") or []), *(row.get("large_topk_ids") or [])]
    ids += [i for said in views for i in said.get("topk_ids") or []]
    choices = [row.get("small_choice"), *(said.get("choice") for said in views), row.get("large_choice")]
    return ids + [choice for choice in choices if choice is not None]


def wanted_ids(steps: Steps, position: int) -> list[int]:
    """Those of them whose text this trace does not hold itself."""
    return [i for i in dict.fromkeys(shown_ids(steps, position)) if i not in steps.by_token]


def token_names(steps: Steps, position: int, texts: Mapping[int, str]) -> dict[int, str]:
    """Marked text of the tokens that the panel names at position, as far as it is known."""
    names = {}
    for token in shown_ids(steps, position):
        if token in steps.by_token:
            names[token] = alone(steps.tokens[steps.by_token[token]], 40)
        elif token in texts:
            names[token] = alone(texts[token].encode("utf-8", "replace"), 40)
    return names


def card(
    policy: Policy | None, steps: Steps, position: int, names: Mapping[int, str], numbers: bool = True
) -> str:
    """The whole panel for the step at position; without `numbers` only token, rules and top tokens."""
    row = steps.row(position)
    outcome, tier = str(row.get("outcome")), str(row.get("tier"))
    token = alone(steps.tokens[position], 2000)
    where = f"step {row.get('idx')}"
    if outcome in {"rejected", "discarded"}:
        where += f", draft {(row.get('draft_pos') or 0) + 1}"
    title = (
        f'<div class="tt-title"><b>{where}</b><code>{markup(token)}</code>'
        f'<span class="tt-tier {escape(tier)}">{escape(tier)}</span>'
        f'<span title="{escape(OUTCOMES.get(outcome, ""))}">{escape(outcome)}</span>'
        f"{_overruled(row)}{_audit(row, names)}</div>"
    )
    tops = (
        f'<div class="tt-tops">{_bars("small", row, names, row.get("small_choice"), row.get("token_id"))}'
        f"{''.join(_middle(said, names, row.get('token_id')) for said in row.get('middle') or ())}"
        f"{_bars('large', row, names, row.get('large_choice'), row.get('token_id'))}</div>"
    )
    rules = _rules(verdict(policy, row) if policy else None, row, steps, position)
    return f'<div class="tt-card">{title}{rules}{tops}{_numbers(row) if numbers else ""}</div>'


def _overruled(row: Mapping[str, Any]) -> str:
    by = row.get("overruled_by")
    return "" if by is None else f'<span class="tt-bad">overruled by {escape(str(by))}</span>'


def _middle(said: Mapping[str, Any], names: Mapping[int, str], token: int | None) -> str:
    """What a middle tier made of the position, what it decided, and its top tokens."""
    tier, reason = str(said.get("tier")), said.get("reason")
    words = escape(VERDICTS.get(str(said.get("verdict")), ""))
    if reason is not None:
        score = said.get("score")
        why = "" if score is None else f", score {number(score)} of {number(said.get('threshold'))}"
        words += f" → {escape(str(said.get('action')))}: {escape(str(reason))}{why}"
    tops = {f"{tier}_topk_ids": said.get("topk_ids"), f"{tier}_topk_logprobs": said.get("topk_logprobs")}
    note = f'<div class="tt-dim">{words}</div>'
    return f"<div>{note}{_bars(tier, tops, names, said.get('choice'), token)}</div>"


def _audit(row: Mapping[str, Any], names: Mapping[int, str]) -> str:
    source = escape(f"found out by: {row.get('audit_source') or 'nothing'}")
    if row.get("tier") == "large":
        choice = row.get("small_choice")
        if choice is None:
            return ""
        if choice == row.get("token_id"):
            return '<span class="tt-good">✓ the small model would have written it too</span>'
        wanted = markup(names.get(choice, f"#{choice}"))
        return f'<span class="tt-bad">✗ the small model wanted <code>{wanted}</code></span>'
    agrees, choice = row.get("audit_agrees"), row.get("large_choice")
    if agrees is None:
        return '<span class="tt-dim">the large model has not looked</span>'
    if agrees:
        return f'<span class="tt-good" title="{source}">✓ the large model agrees</span>'
    wanted = "another" if choice is None else f"<code>{markup(names.get(choice, f'#{choice}'))}</code>"
    return f'<span class="tt-bad" title="{source}">✗ the large model wanted {wanted}</span>'


def _rules(found: Verdict | None, row: Mapping[str, Any], steps: Steps, position: int) -> str:
    if found is None:
        return '<div class="tt-rules tt-dim">The policy of this trace is not readable by this version.</div>'
    if not found.rules:
        said = "No rule decided this row."
        if row.get("outcome") == "recovered":
            before = steps.rejected_before(position)
            if before is not None:
                said = (
                    "Here the large model refused the draft "
                    f"<code>{markup(alone(steps.tokens[before], 40))}</code> and wrote its own token."
                )
        elif row.get("outcome") == "forced":
            said = "This token was given with the fork, not decoded."
        elif row.get("outcome") == "bonus" and not row.get("middle"):
            said = (
                "No rule decided this row. The token before rode along and was the large model's own, so the "
                "same pass gave this one too."
            )
        return f'<div class="tt-rules tt-dim">{said}</div>'
    cells = ""
    for rule in found.rules:
        fired = rule.verdict in {"keep", "defer"}
        kind = f"fired {rule.verdict}" if fired else "quiet" if rule.verdict == "no" else "unreached"
        says = f"→ {rule.verdict}" if fired else rule.verdict
        cells += (
            f'<div class="{kind}"><small>{escape(rule.name)}</small> {escape(rule.text)} '
            f"<em>{escape(says)}</em></div>"
        )
    mark = {
        True: '<div class="tt-dim">✓ decided anew: the same</div>',
        False: '<div class="tt-bad">✗ decided anew: differs from the tape</div>',
        None: '<div class="tt-dim">inputs not recorded in full</div>',
    }[found.agrees]
    return f'<div class="tt-rules">{cells}{mark}</div>'


def _bars(
    who: str, row: Mapping[str, Any], names: Mapping[int, str], choice: int | None, token: int | None
) -> str:
    ids, logprobs = row.get(f"{who}_topk_ids") or [], row.get(f"{who}_topk_logprobs") or []
    if not ids:
        why = "has not seen this token" if who == "large" else "was not asked here"
        return f'<div><div class="tt-who">{who}</div><div class="tt-dim">The {who} model {why}.</div></div>'
    lines = ""
    for i, logprob in zip(ids, logprobs, strict=False):
        p = math.exp(min(logprob, 0.0))
        marks = ("tt-chosen " if i == choice else "") + ("tt-written" if i == token else "")
        lines += (
            f'<div class="tt-bar {marks}" title="id {i}, log-probability {logprob:.3f} nats">'
            f"<code>{markup(names.get(i, f'#{i}'))}</code>"
            f'<span><u class="{who}" style="width:{p * 100:.1f}%"></u></span><b>{p:.3f}</b></div>'
        )
    return f'<div><div class="tt-who">{who} model\'s top tokens</div>{lines}</div>'


def _numbers(row: Mapping[str, Any]) -> str:
    latency = row.get("latency_us")
    facts = [
        ("gap", number(row.get("gap"), 3), "small model: top token's probability minus the runner-up's"),
        ("entropy", f"{number(row.get('entropy'))} nats", "of the small model's distribution"),
        ("p large", number(row.get("p_large"), 3), "the large model's probability of this token"),
        ("acceptance", number(row.get("ema_acceptance")), "running share of drafts that stood"),
        (
            "drafted",
            f"{row.get('draft_pos', DASH)} of {row.get('draft_limit', DASH)}",
            "waiting drafts, limit",
        ),
        ("run", f"{row.get('run_length', DASH)}", "tokens in a row not written by the large model"),
        (
            "pass",
            f"{row.get('pass_id', DASH)}, {row.get('batch_rows', DASH)} rows",
            "model pass, rows in it",
        ),
        ("latency", DASH if latency is None else f"{latency / 1000:.1f} ms", "since the commit before"),
        ("KV", f"{row.get('small_kv', DASH)} / {row.get('large_kv', DASH)}", "tokens cached: small / large"),
        ("round", f"{row.get('round', DASH)}, tick {row.get('tick', DASH)}", "draft round, engine tick"),
    ]
    cells = "".join(
        f'<span title="{escape(why)}"><small>{name}</small> {escape(str(text))}</span>'
        for name, text, why in facts
    )
    return f'<div class="tt-numbers">{cells}</div>'


def prompt(summary: Mapping[str, Any], limit: int = 4000) -> str | None:
    """The prompt as inert HTML, cut at limit characters; None where it was not recorded."""
    text = summary.get("prompt_text") or summary.get("prompt_preview")
    if not text:
        return None
    lines = markup(prose(str(text)[:limit], limit))
    more = len(str(text)) - limit
    cut = (
        f'<p class="tt-dim">… {more:,} more characters: export the trace to read them.</p>'
        if more > 0
        else ""
    )
    return f'<div class="tt-prompt">{lines}{cut}</div>'
