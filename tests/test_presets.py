"""Names of pairs to local folders: presets, local folders, GGUF files, hub ids; what cannot be served."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from model_fakes import hf_model, split_into_wheels, write_gguf
from transformers import AutoModelForCausalLM

from gateway import fetch as fetching
from gateway import presets, tiny
from gateway.config import ModelsConfig
from gateway.fetch import Wheel
from gateway.servable import ModelsError, reason_against
from gateway.text import Tokenizer

SHARED = json.loads(Path(presets.__file__).with_name("qwen-coder.json").read_text())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENTAPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_tiny_is_built_and_found_again(cache: Path) -> None:
    pair = presets.resolve("tiny")
    assert pair == presets.resolve(ModelsConfig(preset="tiny")) == presets.pull("tiny")
    assert pair.name == "tiny"
    assert (pair.small.name, pair.large.name) == ("small", "large")
    assert cache in pair.small.parents


def test_unknown_presets_are_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ModelsError, match=r"models.preset: 'huge' is not a preset \(presets: qwen-coder, tiny\)"
    ):
        presets.pull("huge")


def test_listing_shows_source_licence_and_every_hash(cache: Path) -> None:
    told = presets.listing()
    for name, model in SHARED.items():
        if name == "note":
            continue
        for word in (name, model["upstream"], model["license"], model["gguf_sha256"]):
            assert word in told
        for wheel in model["wheels"]:
            assert f"{wheel['package']} {wheel['version']} sha256 {wheel['wheel_sha256']}" in told
    assert told.count("cached:   no") == 2
    small = presets.presets()["qwen-coder"].small
    presets._folder(small.gguf_sha256, small.name, cache).mkdir(parents=True)
    assert presets.listing().count("cached:   no") == 1


@pytest.fixture
def fake_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A preset of one fake model in both roles; lists the wheels downloaded."""
    index = tmp_path / "index"
    index.mkdir()
    data = write_gguf(tmp_path / "m.gguf", hf_model("qwen2")).read_bytes()
    source = split_into_wheels(index, "fake-model", data, 3)
    preset = presets.Preset("fake", source, source)
    monkeypatch.setattr(presets, "presets", lambda: {"fake": preset})
    done: list[str] = []

    def copy(wheel: Wheel, into: Path, show: object) -> Path:
        done.append(wheel.package)
        return Path(shutil.copy(index / f"{wheel.package.replace('-', '_')}-1.0-py3-none-any.whl", into))

    monkeypatch.setattr(fetching, "download_wheel", copy)
    return done


def test_a_preset_is_fetched_and_converted_once(fake_preset: list[str], cache: Path) -> None:
    pair = presets.resolve("fake")
    assert fake_preset == [f"fake-model-part{i}" for i in (1, 2, 3)]
    assert pair.small == pair.large
    assert pair.small.name == "fake-model"
    loaded = AutoModelForCausalLM.from_pretrained(pair.small, dtype=torch.float32)
    assert torch.equal(loaded.lm_head.weight, hf_model("qwen2").lm_head.weight)
    assert not list((cache / "downloads").iterdir())
    assert presets.resolve("fake") == pair
    assert len(fake_preset) == 3


def test_an_interrupted_conversion_keeps_the_download(
    fake_preset: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("gateway.gguf.tokenizer_of", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            presets.pull("fake")
    assert [p.name for p in (cache / "downloads" / "fake-model").iterdir()] == ["fake-model.gguf"]
    assert presets.pull("fake").small.is_dir()
    assert len(fake_preset) == 3


def test_too_little_disk_is_told_before_the_download(
    fake_preset: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ModelsError, match=r"fake-model needs .* GB of free disk"):
        presets.pull("fake")
    assert fake_preset == []


def test_an_unwritable_cache_is_one_line(
    tmp_path: Path, fake_preset: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOKENTAPE_CACHE", str(tmp_path / "file"))
    for name in ("fake", "tiny"):
        with pytest.raises(ModelsError, match="model cache"):
            presets.pull(name)


def test_local_folders_and_gguf_files_serve(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "mine.gguf", hf_model("qwen2"))
    pair = presets.resolve(ModelsConfig(small=str(file), large=str(file)))
    assert pair.small.name == "mine"
    again = presets.resolve(ModelsConfig(small=str(pair.small), large=str(file)))
    assert again.small == pair.small == again.large


def test_a_hub_id_is_downloaded_without_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = tiny.build(tmp_path)
    asked = []

    def download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repo, revision))
        assert not any("bin" in p or "py" in p for p in allow_patterns)
        return str(built / repo.split("/")[1])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    pair = presets.resolve(ModelsConfig(small="me/small@v2", large="me/large"))
    assert (pair.small, pair.large) == (built / "small", built / "large")
    assert asked == [("me/small", "v2"), ("me/large", None)]
    assert pair.name == "me/small@v2+me/large"


def test_names_that_lead_nowhere_name_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(tiny.build(tmp_path) / "small")
    with pytest.raises(ModelsError, match=r"models.large: './nothing/here/x' is no folder"):
        presets.resolve(ModelsConfig(small=here, large="./nothing/here/x"))
    with pytest.raises(ModelsError, match=r"models.small: 'a/b.gguf' is no folder"):
        presets.resolve(ModelsConfig(small="a/b.gguf", large=here))

    def gone(*_: object, **__: object) -> str:
        raise OSError("404 no such repository\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", gone)
    with pytest.raises(ModelsError, match=r"models.large: 'me/gone' cannot be had.*404 no such repository$"):
        presets.resolve(ModelsConfig(small=here, large="me/gone"))


def test_tokenizers_that_differ_are_refused(tmp_path: Path) -> None:
    folder = tiny.build(tmp_path / "a")
    other = Path(shutil.copytree(folder / "small", tmp_path / "other"))
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ModelsError, match=r"models.small: the tokenizer .* differs .*\(260 and 259 tokens\)"):
        presets.resolve(ModelsConfig(small=str(other), large=str(folder / "large")))


def test_same_tokens_in_other_files_are_accepted(tmp_path: Path) -> None:
    folder = tiny.build(tmp_path / "a")
    other = Path(shutil.copytree(folder / "small", tmp_path / "other"))
    file = other / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=None))
    assert presets.resolve(ModelsConfig(small=str(other), large=str(folder / "large"))).small == other


def test_a_model_that_cannot_be_served_is_refused(tmp_path: Path) -> None:
    folder = tiny.build(tmp_path / "a")
    other = Path(shutil.copytree(folder / "small", tmp_path / "other"))
    config = json.loads((other / "config.json").read_text()) | {"model_type": "mistral", "sliding_window": 64}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelsError, match="sliding-window"):
        presets.resolve(ModelsConfig(small=str(other), large=str(folder / "large")))


@pytest.mark.e2e
@pytest.mark.timeout(1800)
def test_the_real_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetched or cached in the user's own cache; the figures are those the upstream model card publishes."""
    monkeypatch.delenv("TOKENTAPE_CACHE")
    pair = presets.resolve("qwen-coder")
    small, large = Tokenizer.load(pair.small), Tokenizer.load(pair.large)
    assert small.fingerprint == large.fingerprint
    assert large.vocab_size == 151665
    assert large.eos_ids == {151643, 151645}
    assert large.token_bytes(151645) == b"<|im_end|>"
    for folder, layers in ((pair.small, 24), (pair.large, 28)):
        config = json.loads((folder / "config.json").read_text())
        assert config["num_hidden_layers"] == layers
        assert reason_against(config) is None
    for text in ["I'll pay 12345 for it\n\n  ok", "你好世界", "def f(x):\n    return x ** 2\n", "é👨‍👩‍👧‍👦"]:
        ids = large.encode(text)
        assert large.decode(ids) == text
        assert b"".join(map(large.token_bytes, ids)) == text.encode()
    assert [large.token_bytes(i) for i in large.encode("123")] == [b"1", b"2", b"3"]
    assert hashlib.sha256((pair.small / "tokenizer.json").read_bytes()).digest() == (
        hashlib.sha256((pair.large / "tokenizer.json").read_bytes()).digest()
    )
    ids = torch.tensor([large.chat([{"role": "user", "content": "Reply with the single word: yes"}])])
    for folder in (pair.small, pair.large):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
        assert large.decode(out[0, ids.shape[1] :].tolist()).strip().lower().startswith("yes")
        assert int(out[0, -1]) in large.eos_ids
