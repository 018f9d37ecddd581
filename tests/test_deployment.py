"""Dockerfile and compose.yaml say what the Makefile and the command line say; no Docker here to ask."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.access import KEY_VARIABLE
from gateway.cli import build_parser
from gateway.config import Config, load_config

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def instructions(name: str) -> list[str]:
    """The arguments of every instruction of that name, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", DOCKERFILE)
    return re.findall(rf"^{name} (.*)$", text, flags=re.MULTILINE)


def variables() -> dict[str, str]:
    """What ENV sets."""
    return dict(part.split("=", 1) for line in instructions("ENV") for part in shlex.split(line))


def test_every_copied_path_exists() -> None:
    sources = [
        source
        for line in instructions("COPY")
        if not line.startswith("--from")
        for source in line.split()[:-1]
    ]
    assert {"pyproject.toml", "constraints.txt", "gateway", "logs", "alerts", "replay_ui"} <= set(sources)
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_every_package_is_copied() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages <= {line.split()[0] for line in instructions("COPY")}


def test_it_installs_with_the_makefiles_constraints() -> None:
    (install,) = [line for line in instructions("RUN") if "pip install" in line]
    assert "-c constraints.txt" in install
    assert "pip install -c constraints.txt" in MAKEFILE
    assert "${TORCH_INDEX}" in install
    assert "TORCH_INDEX=https://download.pytorch.org/whl/cpu" in instructions("ARG")


def test_openmp_waits_as_in_the_makefile() -> None:
    exported = dict(re.findall(r"^export (\w+) := (\S+)$", MAKEFILE, flags=re.MULTILINE))
    assert exported
    assert exported == {name: variables().get(name) for name in exported}


def test_the_command_is_the_makefiles() -> None:
    defaults = dict(re.findall(r"^(\w+) \?= (\S+)$", MAKEFILE, flags=re.MULTILINE))
    (command,) = [json.loads(line) for line in instructions("CMD") if line.startswith('["serve"')]
    options = build_parser().parse_args(command)
    assert (options.preset, str(options.port)) == (defaults["PRESET"], defaults["PORT"])
    (served,) = re.findall(r"tokentape (serve .*)$", MAKEFILE, flags=re.MULTILINE)
    for name, value in defaults.items():
        served = served.replace(f"$({name})", value)
    same = build_parser().parse_args(shlex.split(served))
    assert (same.preset, same.port) == (options.preset, options.port)


def test_commands_of_compose_are_valid() -> None:
    command = COMPOSE["services"]["ui"]["command"]
    options = build_parser().parse_args(command)
    assert (options.host, options.port) == ("0.0.0.0", 8501)


def test_ports_agree() -> None:
    exposed = set(instructions("EXPOSE")[0].split())
    published = {
        str(port).rsplit(":", 1)[1]
        for name in ("gateway", "ui")
        for port in COMPOSE["services"][name]["ports"]
    }
    defaults = Config().server
    assert exposed == published == {str(defaults.port), str(defaults.ui_port)}


def test_the_ui_and_prometheus_are_published_on_loopback_only() -> None:
    for name in ("ui", "prometheus"):
        assert all(port.startswith("127.0.0.1:") for port in COMPOSE["services"][name]["ports"])


def test_the_container_does_not_run_as_root() -> None:
    assert instructions("USER") == ["tokentape"]


def test_compose_sets_a_key_because_the_gateway_binds_outward() -> None:
    assert KEY_VARIABLE in COMPOSE["services"]["gateway"]["environment"]
    assert ":?" in COMPOSE["services"]["gateway"]["environment"][KEY_VARIABLE]


def test_volumes_hold_the_tape_and_the_models() -> None:
    mounted = dict(volume.split(":") for volume in COMPOSE["services"]["gateway"]["volumes"])
    config = load_config(None, variables())
    assert mounted == {"tape": str(config.data_dir), "models": variables()["TOKENTAPE_CACHE"]}
    assert set(mounted) == set(COMPOSE["volumes"])


def test_health_checks_ask_paths_that_exist() -> None:
    from gateway.api.http import HANDLERS

    paths = {path for handler in HANDLERS for path in handler.paths}
    asked = re.findall(r"127\.0\.0\.1:8000(/\w+)", DOCKERFILE + (ROOT / "compose.yaml").read_text())
    assert sorted(asked) == ["/health", "/ready"]
    assert set(asked) <= paths


def test_the_grace_period_outlasts_the_drain() -> None:
    grace = int(COMPOSE["services"]["gateway"]["stop_grace_period"].removesuffix("s"))
    assert grace > Config().server.drain_s


@pytest.mark.parametrize("service", ["gateway", "ui"])
def test_services_have_health_checks(service: str) -> None:
    assert COMPOSE["services"][service]["healthcheck"]["test"][0] == "CMD"


def test_prometheus_scrapes_the_gateway() -> None:
    scraped = yaml.safe_load(COMPOSE["configs"]["prometheus"]["content"])["scrape_configs"]
    assert scraped[0]["static_configs"][0]["targets"] == ["gateway:8000"]
