from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import Config, ConfigError, load_config, markdown
from gateway.core import Accept, Mode
from gateway.policy import Policy
from gateway.routing import PolicyTable


def load(tmp_path: Path, text: str) -> Config:
    file = tmp_path / "tokentape.toml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, {})


def test_every_table_is_read(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
        [models]
        preset = "tiny"
        [engine]
        max_rows = 3
        [server]
        port = 9
        [logs]
        data_dir = "/x"
        [policy.stable]
        threshold = 0.7
        [policy.careful]
        mode = "large_only"
        """,
    )
    assert ("tiny", 3, 9, Path("/x")) == (
        config.models.preset,
        config.engine.max_rows,
        config.server.port,
        config.data_dir,
    )
    assert {
        "stable": replace(Policy(), threshold=0.7),
        "careful": replace(Policy(), mode=Mode.LARGE_ONLY),
    } == config.policies


def test_stable_exists_without_a_table() -> None:
    assert {"stable": Policy()} == load_config(None, {}).policies


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[server]\nprt = 1", "server.prt"),
        ("[sever]\nport = 1", "sever"),
        ('[server]\nport = "1"', "server.port"),
        ("[engine]\nmax_rows = 0", "engine.max_rows"),
        ('[models]\ndevice = "tpu"', "models.device"),
        ('[models]\nsmall = "a"', "models.large"),
        ('[models]\nsmall = "a"\nlarge = "b"\npreset = "tiny"', "models.preset"),
        ("[policy.stable]\nthreshold = 2.0", "policy.stable.threshold"),
        ("[policy.a]\nfoo = 1", "policy.a.foo"),
        ("[policy.a]\nlarge_token_budget = 20", "policy.a.large_token_budget"),
        ('[policy.a]\naccept = "trust"\nlarge_token_budget = 3', "policy.a.large_token_budget"),
        ("policy = 3", "policy"),
        ("server = 3", "server"),
        ("[server", "TOML"),
    ],
)
def test_a_bad_key_is_one_line_that_names_it(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")) as caught:
        load(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_config(tmp_path / "absent.toml", {})


def test_environment_overlays_the_file_and_arguments_overlay_both(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[server]\nport = 1\nui_port = 2\nhost = 'a'\n")
    environ = {"TOKENTAPE_SERVER_PORT": "11", "TOKENTAPE_SERVER_UI": "false", "TOKENTAPE_CACHE": "/c"}
    config = load_config(file, environ, {"server.host": "b"})
    assert (
        config.server.port,
        config.server.ui_port,
        config.server.host,
        config.server.ui,
    ) == (11, 2, "b", False)


@pytest.mark.parametrize("variable", ["TOKENTAPE_SERVER_PRT", "TOKENTAPE_SERVER_PORT"])
def test_a_bad_variable_is_named(variable: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        load_config(None, {variable: "x"})


@settings(max_examples=40)
@given(st.text(min_size=1, max_size=30))
def test_no_unknown_key_is_accepted(key: str) -> None:
    known = set(PolicyTable.__struct_fields__)
    quoted = "".join(f"\\U{ord(c):08X}" for c in key if not 0xD800 <= ord(c) < 0xE000)
    if key in known or not quoted:
        return
    file = Path(__file__).parent / "output" / "fuzz.toml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f'[policy.a]\n"{quoted}" = 1\n', encoding="utf-8")
    with pytest.raises(ConfigError):
        load_config(file, {})


def test_policy_tables_have_exactly_the_fields_of_policy() -> None:
    assert {field.name for field in fields(Policy)} == set(PolicyTable.__struct_fields__)


def test_served_name() -> None:
    def name(**models: str) -> str:
        return load_config(None, {}, {f"models.{k}": v for k, v in models.items()}).models.served_name

    assert name() == "qwen-coder"
    assert name(preset="tiny") == "tiny"
    assert name(small="Qwen/Qwen3-0.6B", large="Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert name(small="a.gguf", large="/models/big.gguf") == "big"


def test_the_readme_documents_every_key() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8").splitlines()
    missing = [line for line in markdown().splitlines() if line not in readme]
    assert missing == [], "paste the output of `tokentape config` into the README"


def test_every_key_has_a_meaning() -> None:
    rows = [line for line in markdown().splitlines() if line.startswith("| `") and "default" not in line]
    assert len(rows) > 30
    assert [row for row in rows if row.rstrip("| ").endswith("|")] == []
    assert all(accept.value in markdown() for accept in Accept)
