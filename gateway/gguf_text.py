"""The tokenizer inside a GGUF file, as Hugging Face's.

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) but does not hold it: the expression that splits
text before merging, and any Unicode normalisation, come from the table here, as each model's authors publish
them. With a wrong one a model still answers, only worse, so an unknown name is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from gateway.servable import ModelsError

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
"""Values of tokenizer.ggml.token_type (GGUF specification)."""

ENDS = frozenset({"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "</s>"})
"""Control tokens that end an answer in every model that has them."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Splitting:
    """How text is cut before merging. pattern None: GPT-2's own expression."""

    pattern: str | None
    nfc: bool = False
    ignore_merges: bool = False


SPLITTINGS: Mapping[str, Splitting] = {
    "gpt-2": Splitting(None),
    "llama-bpe": Splitting(rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}", ignore_merges=True),
    "qwen2": Splitting(rf"{_WORDS}|\p{{N}}|{_REST}", nfc=True),
}
"""tokenizer.ggml.pre -> splitting."""


def tokenizer_of(fields: Mapping[str, Any], context_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF file's metadata, chat template included; ModelsError names what is missing.

    Unused ids at the end of the table ([PAD151665] and on in Qwen's) are rows of padding in the model's
    head, not text, and are left out, as upstream.
    """
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelsError(
            f"GGUF tokenizer {kind!r} is not supported (supported: gpt2); "
            "name the model's Hugging Face folder or hub id instead"
        )
    splitting = SPLITTINGS.get(fields.get("tokenizer.ggml.pre", ""))
    if splitting is None:
        raise ModelsError(
            f"GGUF pre-tokenizer {fields.get('tokenizer.ggml.pre')!r} is not supported "
            f"(supported: {', '.join(sorted(SPLITTINGS))}); name the Hugging Face folder or hub id instead"
        )
    names, types = list(fields["tokenizer.ggml.tokens"]), _types(fields)
    while types and types[-1] == UNUSED:
        names.pop()
        types.pop()
    fast = _byte_level_bpe(names, types, fields["tokenizer.ggml.merges"], splitting)

    def named(key: str) -> str | None:
        i = fields.get(f"tokenizer.ggml.{key}_token_id")
        return names[i] if i is not None and i < len(names) else None

    # Without add_bos_token the id is only a placeholder (Qwen's is <|endoftext|>).
    bos = named("bos") if fields.get("tokenizer.ggml.add_bos_token") else None
    if bos is not None:
        fast.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, names.index(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token=bos,
        eos_token=named("eos"),
        pad_token=named("padding"),
        chat_template=fields.get("tokenizer.chat_template"),
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )


def end_ids(fields: Mapping[str, Any]) -> list[int]:
    """Every id that ends an answer: those the file names, first, and control tokens known to."""
    named = [fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    tokens = zip(fields["tokenizer.ggml.tokens"], _types(fields), strict=True)
    known = [i for i, (name, kind) in enumerate(tokens) if kind == CONTROL and name in ENDS]
    return list(dict.fromkeys(i for i in [*named, *reversed(known)] if i is not None))


def _types(fields: Mapping[str, Any]) -> list[int]:
    """The type of every id; all normal where the file has none."""
    return list(fields.get("tokenizer.ggml.token_type") or [1] * len(fields["tokenizer.ggml.tokens"]))


def _byte_level_bpe(names: list[str], types: list[int], merges: list[str], splitting: Splitting) -> Tokenizer:
    added = {i for i, t in enumerate(types) if t in (CONTROL, USER_DEFINED)}
    fast = Tokenizer(
        models.BPE(
            vocab={n: i for i, n in enumerate(names) if i not in added},
            merges=[(a, b) for a, b in (m.split(" ", 1) for m in merges)],
            ignore_merges=splitting.ignore_merges,
        )
    )
    if splitting.nfc:
        fast.normalizer = normalizers.NFC()
    if splitting.pattern is None:
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        fast.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    fast.decoder = decoders.ByteLevel()
    # Ids are given out in order, so added tokens must sit after the vocabulary or fill its gaps in order.
    for i in sorted(added):
        token = AddedToken(names[i], special=types[i] == CONTROL, normalized=False)
        (fast.add_special_tokens if types[i] == CONTROL else fast.add_tokens)([token])
        if fast.token_to_id(names[i]) != i:
            raise ModelsError(
                f"GGUF tokenizer: control token {names[i]!r} has id {i} before the vocabulary's end"
            )
    return fast
