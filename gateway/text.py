"""Text to token ids and back: the chat template, exact token bytes, incremental output text, stop strings."""

from __future__ import annotations

import codecs
import copy
import hashlib
import inspect
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

METASPACE = "\u2581"
"""SentencePiece's visible space."""

TEMPLATE_PARAMETERS = {
    "messages",
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
} - {"documents"}
"""What a client's template variables may not be called: transformers would take them for its own options,
the template itself among them, which then is a program of the client's that we would run."""


class ChatTemplateError(ValueError):
    """The model has no chat template, or its template refused the messages; the message says which."""


class Tokenizer:
    """A Hugging Face fast tokenizer; safe to read from several threads.

    vocab_size: ids 0..vocab_size-1 have text (a model's padded head may be larger). eos_ids: every id that
    ends an answer by the folder's generation config, config or tokenizer. special_ids: ids that are control,
    not text. fingerprint: sha256, equal iff token ids mean the same and text splits the same way.
    """

    def __init__(self, hf: Any, eos_ids: Iterable[int]) -> None:
        self._hf = hf
        # Encoding through transformers sets truncation, padding and special-token flags on the tokenizer
        # underneath, which threads share; so we encode with that one directly and never through
        # transformers, but for `_sanitized`, a copy of its own behind a lock.
        self._fast = hf.backend_tokenizer
        self._fast.no_truncation()
        self._fast.no_padding()
        self._sanitizer: Any = None
        self._sanitizer_lock = threading.Lock()
        spec = json.loads(self._fast.to_str())
        added = self._fast.get_added_tokens_decoder()
        self._bytes = _all_token_bytes(self._fast, spec, {i: t.content for i, t in added.items()})
        self._control = tuple(sorted({t.content for t in added.values() if t.content}))
        self.vocab_size = len(self._bytes)
        self.special_ids = frozenset({i for i, t in added.items() if t.special} | set(hf.all_special_ids))
        self.eos_ids = frozenset(i for i in eos_ids if 0 <= i < self.vocab_size)
        self.has_chat_template = bool(hf.chat_template)
        self.fingerprint = _fingerprint(spec)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """The tokenizer of a local model folder; ValueError where there is none or it is not a fast one."""
        try:
            hf = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            first_line = str(error).strip().split("\n")[0]
            raise ValueError(f"{path}: no tokenizer could be loaded: {first_line}") from error
        if not hf.is_fast:
            raise ValueError(f"{path}: only fast tokenizers (tokenizer.json) are supported")
        eos_ids = _eos_ids_in(path / "generation_config.json") | _eos_ids_in(path / "config.json")
        return cls(hf, eos_ids | ({hf.eos_token_id} if hf.eos_token_id is not None else set()))

    def to_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json."""
        return str(self._fast.to_str())

    def info(self) -> dict[str, Any]:
        """What a client needs to make the same tokenizer: tokenizer_config.json as transformers knows it."""
        left_out = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path")
        settings = {k: v for k, v in self._hf.init_kwargs.items() if k not in left_out}
        named = {"tokenizer_class": type(self._hf).__name__, "chat_template": self._hf.chat_template}
        info: dict[str, Any] = json.loads(json.dumps({**settings, **named}, default=str))
        return info

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of text; control tokens spelled out in it are honoured. ValueError on lone surrogates."""
        _check_unicode(text)
        return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation under the model's chat template; ChatTemplateError where that fails.

        Control tokens spelled out inside a message are encoded as ordinary text, so that a user cannot
        end their own turn and write the assistant's.
        """
        if not self.has_chat_template:
            raise ChatTemplateError("this model has no chat template")
        options: dict[str, Any] = dict(template_kwargs or {})
        options |= {
            "tools": [dict(t) for t in tools] if tools else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
        }
        conversation = [dict(m) for m in messages]
        given = json.dumps([conversation, options], ensure_ascii=False, default=str)
        _check_unicode(given)
        try:
            # json escapes quotes and backslashes; a control token that has either is looked for escaped.
            if any(json.dumps(c, ensure_ascii=False)[1:-1] in given for c in self._control):
                return self._sanitized(conversation, options)
            text = self._hf.apply_chat_template(conversation, tokenize=False, **options)
        except (TemplateError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ChatTemplateError(f"the chat template refused the messages: {error}") from error
        return self.encode(text, add_special_tokens=False)

    def _sanitized(self, conversation: list[dict[str, Any]], options: Mapping[str, Any]) -> list[int]:
        """As `chat`, with the control tokens inside messages taken as text."""
        with self._sanitizer_lock:
            if self._sanitizer is None:
                self._sanitizer = copy.deepcopy(self._hf)
            ids = self._sanitizer.apply_chat_template(
                conversation, tokenize=True, return_dict=False, sanitize_control_tokens=True, **options
            )
        return [int(i) for i in ids]

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes the token adds to the text; a control token's name, nothing for an unknown id."""
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode("utf-8", "replace")


class TextStream:
    """One choice's output text, token by token.

    What `push` and `flush` return, joined, is `Tokenizer.decode` of the pushed ids, cut at the first stop
    string. A stop string is found as if the text came character by character: the one that ends first wins
    (of two that end together, the longer), however the text is split into tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        if "" in stop:
            raise ValueError("stop: an empty string would stop everywhere")
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._stop = stop
        self._include_stop = include_stop
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Text released now: never half a character, never what may turn into a stop string.

        may_stop False (min_tokens is not reached): no stop string may end, or begin, with this token.
        """
        if self.stopped is not None or token_id in self._skipped:
            return ""
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        return self._release(text) if may_stop else text

    def flush(self) -> str:
        """Text still held back at the end; empty after a stop."""
        if self.stopped is not None:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        rest, self._held = self._held, ""
        return text + rest

    def _release(self, text: str) -> str:
        if not self._stop:
            return text
        self._held += text
        found = [(at + len(s), at, s) for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            end, start, self.stopped = min(found)
            out, self._held = self._held[: end if self._include_stop else start], ""
            return out
        keep = max(_overlap(self._held, s) for s in self._stop)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that begins stop."""
    return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"not valid Unicode: lone surrogate at character {error.start}") from error


def _eos_ids_in(file: Path) -> set[int]:
    """A Hugging Face config's eos_token_id, which is an int, a list or absent."""
    if not file.exists():
        return set()
    value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    return {value} if isinstance(value, int) else set(value or ())


def _fingerprint(spec: Mapping[str, Any]) -> str:
    """sha256 over vocabulary, merges and added tokens of a tokenizer.json."""
    model = spec["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        pieces = [f"{i} {piece}" for piece, i in sorted(vocab.items(), key=lambda kv: kv[1])]
    else:
        pieces = [repr(piece) for piece in vocab]
    merges = [" ".join(m) if isinstance(m, list) else m for m in model.get("merges") or ()]
    added = sorted(f"{t['id']} {t['special']} {t['content']}" for t in spec["added_tokens"])
    # Pieces hold no control bytes in any format, so these separators keep the lists apart.
    told = "\x01".join("\x00".join(part) for part in (pieces, merges, added))
    return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, turned round: printable Latin-1 stands for itself, the
    others for U+0100 upwards in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _decoders(spec: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The decoders of a tokenizer.json, sequences flattened."""
    if not spec:
        return []
    if spec["type"] == "Sequence":
        return [d for inner in spec["decoders"] for d in _decoders(inner)]
    return [spec]


def _all_token_bytes(
    fast: tokenizers.Tokenizer, spec: Mapping[str, Any], added: Mapping[int, str]
) -> list[bytes]:
    """Bytes of every id: byte-level BPE and SentencePiece exactly, others by decoding after an anchor."""
    names = {i: t for t, i in fast.get_vocab(with_added_tokens=True).items()}
    out = [b""] * (max(names) + 1)
    kinds = {d["type"] for d in _decoders(spec.get("decoder"))}
    spaced = "Metaspace" in kinds or any(
        d["type"] == "Replace" and d["pattern"].get("String") == METASPACE
        for d in _decoders(spec.get("decoder"))
    )
    byte_of = _byte_of_char().__getitem__
    anchor = next((i for i, t in names.items() if i not in added and t.isalnum()), None)
    before = fast.decode([anchor]) if anchor is not None else ""
    for i, name in names.items():
        if i in added:
            out[i] = added[i].encode("utf-8", "replace")
        elif "ByteLevel" in kinds:
            try:
                out[i] = bytes(map(byte_of, name))
            except KeyError:
                out[i] = name.encode("utf-8", "replace")
        elif spaced or "ByteFallback" in kinds:
            out[i] = _sentencepiece_bytes(name, "ByteFallback" in kinds)
        elif anchor is None:
            out[i] = fast.decode([i], skip_special_tokens=False).encode("utf-8", "replace")
        else:
            pair = fast.decode([anchor, i], skip_special_tokens=False)
            out[i] = pair.removeprefix(before).encode("utf-8", "replace")
    return out


def _sentencepiece_bytes(piece: str, byte_fallback: bool) -> bytes:
    if byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece.replace(METASPACE, " ").encode("utf-8", "replace")
