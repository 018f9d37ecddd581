"""Scores of answers in words: exact match and F1 as SQuAD has them, ROUGE-L."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from gateway.config import ConfigError
from gateway.tuning.prompts import Prompt

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(answer: str) -> str:
    """Lower case, without punctuation, articles and extra space (Rajpurkar et al. 2016, arXiv 1606.05250)."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1 where the normalized answer is one of the references, else 0."""
    return float(normalized(answer) in {normalized(reference) for reference in references})


def f1(answer: str, references: Sequence[str]) -> float:
    """Word overlap with the closest reference, in [0, 1]."""
    return max(_f1(normalized(answer).split(), normalized(one).split()) for one in references)


def _f1(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference:
        return float(answer == reference)
    shared = sum((Counter(answer) & Counter(reference)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(answer), shared / len(reference)
    return 2 * precision * recall / (precision + recall)


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """ROUGE-L F-measure with the closest reference (Lin 2004), by the rouge-score package."""
    return max(float(_rouge().score(one, answer)["rougeL"].fmeasure) for one in references)


def qa(prompt: Prompt, answer: str) -> dict[str, float]:
    """Exact match and F1 of an answer's first line."""
    line = answer.strip().split("\n")[0]
    return {"exact match": exact_match(line, prompt.reference), "F1": f1(line, prompt.reference)}


def summary(prompt: Prompt, answer: str) -> dict[str, float]:
    """ROUGE-L of a summary."""
    return {"ROUGE-L": rouge_l(answer, prompt.reference)}


@cache
def _rouge() -> Any:
    try:
        from rouge_score import rouge_scorer
    except ImportError:
        raise ConfigError(
            "--task summary needs the package rouge-score: pip install 'tokentape[eval]'"
        ) from None
    return rouge_scorer.RougeScorer(["rougeL"], use_stemmer=True)
