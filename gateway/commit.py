"""One token joins the answer: it is counted, turned into text, and may end it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gateway.core import MIDDLES, Finished, FinishReason, Reason, Step, Tick, Tier
from gateway.row import Output, Row


def write(row: Row, step: Step, out: Output, tick: Tick, clock: Callable[[], float]) -> None:
    """Commit the token of a step, whose place in the sequence it has already taken."""
    tick.steps.append(step)
    out.steps.append(step)
    counts = row.counts
    if step.tier is Tier.LARGE:
        counts.large_tokens += 1
        counts.protected_tokens += step.reason is Reason.PROTECTED_PREFIX
    elif step.tier is Tier.SMALL:
        counts.small_tokens += 1
    elif step.tier in MIDDLES:
        counts.middle_tokens = (counts.middle_tokens or 0) + 1
    else:
        counts.lookup_tokens += 1
    if row.lookup is not None:
        row.lookup.extend((step.token_id,))
    if row.timings.first_token is None:
        row.timings.first_token = clock()
    sampling = row.request.sampling
    stops = step.token_id in sampling.stop_token_ids
    ends = not sampling.ignore_eos and step.token_id in row.tokenizer.eos_ids
    if not (stops or ends) or sampling.include_stop_str_in_output:
        may_stop = step.idx + 1 >= sampling.min_tokens
        out.text.append(row.text.push(step.token_id, may_stop=may_stop))
    if stops or ends:
        end(row, FinishReason.STOP, out, clock, stop=step.token_id if stops else None)
    elif row.text.stopped is not None:
        end(row, FinishReason.STOP, out, clock, stop=row.text.stopped)
    elif counts.completion_tokens >= sampling.max_tokens or row.num_prompt + step.idx + 1 >= row.max_len:
        end(row, FinishReason.LENGTH, out, clock)


def end(
    row: Row,
    reason: FinishReason,
    out: Output,
    clock: Callable[[], float],
    *,
    stop: str | int | None = None,
    error: str | None = None,
    retry_after_s: float | None = None,
) -> None:
    """Say how the answer ended and release what text was held back."""
    row.timings.finished = clock()
    row.finished = out.finished = Finished(
        reason, replace(row.counts), row.timings, stop, error, retry_after_s
    )
    out.text.append(row.text.flush())
