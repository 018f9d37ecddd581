"""The model cache: one writer, whole folders only, hashes remembered while files stay the same."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from gateway import store


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENTAPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cache_dir_is_the_variable_or_the_users(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.cache_dir() == cache
    monkeypatch.delenv("TOKENTAPE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert store.cache_dir() == Path("/somewhere/tokentape")


def test_the_second_waits_for_the_first_and_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, order = threading.Event(), []
    monkeypatch.setattr(store, "say", lambda text: (order.append(text), waiting.set()))

    def second() -> None:
        with store.one_at_a_time(cache, "m"):
            order.append("second")

    thread = threading.Thread(target=second)
    with store.one_at_a_time(cache, "m"):
        thread.start()
        assert waiting.wait(10)
        order.append("first")
    thread.join(10)
    assert "waiting for another process" in order[0]
    assert order[1:] == ["first", "second"]


def test_other_names_do_not_wait(cache: Path) -> None:
    with store.one_at_a_time(cache, "a"), store.one_at_a_time(cache, "b"):
        pass


def test_publish_shows_whole_folders_only(cache: Path) -> None:
    folder = cache / "models" / "m"

    def make(half: Path) -> None:
        (half / "a").write_text("1")
        assert not folder.exists()

    store.publish(folder, make)
    assert (folder / "a").read_text() == "1"
    assert list(folder.parent.iterdir()) == [folder]


def test_publish_leaves_nothing_of_a_failure(cache: Path) -> None:
    folder = cache / "models" / "m"
    stale = cache / "models" / ".m-killed"
    stale.mkdir(parents=True)

    def fail(half: Path) -> None:
        (half / "a").write_text("1")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.publish(folder, fail)
    assert list(folder.parent.iterdir()) == []


def model(folder: Path, weights: bytes = b"weights", config: str = "{}") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_model_hash_is_of_contents_not_of_places(tmp_path: Path) -> None:
    lines = [
        f"{name} {hashlib.sha256(data).hexdigest()}\n"
        for name, data in (("config.json", b"{}"), ("model.safetensors", b"weights"))
    ]
    expected = hashlib.sha256("".join(lines).encode()).hexdigest()
    assert expected == store.model_hash(model(tmp_path / "a")) == store.model_hash(model(tmp_path / "b"))
    assert expected != store.model_hash(model(tmp_path / "c", weights=b"weight5"))
    assert expected != store.model_hash(model(tmp_path / "d", config="{ }"))


def test_model_hash_is_read_once_until_a_file_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = store.model_hash(model(tmp_path / "a"))
    assert "hash" in capsys.readouterr().err
    assert first == store.model_hash(tmp_path / "a")
    assert capsys.readouterr().err == ""
    assert first != store.model_hash(model(tmp_path / "a", weights=b"other weights"))


def test_a_damaged_note_is_ignored(tmp_path: Path, cache: Path) -> None:
    first = store.model_hash(model(tmp_path / "a"))
    (note,) = (cache / "hashes").iterdir()
    note.write_text("[]")
    assert first == store.model_hash(tmp_path / "a")
