"""What a large model elsewhere cannot be asked for: an engine returns a few top logprobs, not its logits."""

from __future__ import annotations

from gateway.core import Accept, Mode
from gateway.request import Request

BOUNDED = (Accept.THRESHOLD, Accept.TOKEN_V3)


def refusal(request: Request) -> tuple[str, str] | None:
    """The body's field that cannot be had, and why; None where all can."""
    sampling, policy = request.sampling, request.policy
    if not policy.mode.runs_large:
        return None
    shaped = {
        "presence_penalty": sampling.presence_penalty != 0,
        "frequency_penalty": sampling.frequency_penalty != 0,
        "repetition_penalty": sampling.repetition_penalty != 1,
        "logit_bias": bool(sampling.logit_bias),
        "min_tokens": sampling.min_tokens > 0,
        "response_format": request.constraint is not None,
    }
    for field, asked in shaped.items():
        if asked:
            return field, "it would have to be applied to the large model's logits at every drafted token"
    if request.prompt_logprobs:
        return "prompt_logprobs", "the prompt's logprobs would have to be read from the engine"
    if policy.mode is not Mode.ROUTED:
        return None
    if policy.accept is Accept.TYPICAL:
        return "routing.accept", "`typical` needs the entropy of the large model's whole distribution"
    if policy.accept in BOUNDED and sampling.temperature > 0 and sampling.top_p < 1:
        return "top_p", f"`{policy.accept}` asks whether top_p keeps a draft: for that it needs all logits"
    # A token outside the top k has at most 1 / (k + 1).
    least = 1 / (request.num_topk + 1)
    if policy.accept is Accept.THRESHOLD and policy.accept_threshold <= least:
        why = f"a draft that is not among the {request.num_topk} top logprobs may have up to {least:.3f}"
        return "routing.accept_threshold", why
    return None
