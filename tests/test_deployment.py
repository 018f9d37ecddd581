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
    for name in ("ui", "prometheus", "grafana"):
        assert all(port.startswith("127.0.0.1:") for port in COMPOSE["services"][name]["ports"])


def test_the_container_does_not_run_as_root() -> None:
    assert instructions("USER") == ["tokentape"]


@pytest.mark.parametrize("name", ["gateway", "east", "west", "engine"])
def test_compose_sets_a_key_because_the_gateway_binds_outward(name: str) -> None:
    assert ":?" in COMPOSE["services"][name]["environment"][KEY_VARIABLE]


def test_volumes_hold_the_tape_and_the_models() -> None:
    mounted = dict(volume.split(":") for volume in COMPOSE["services"]["gateway"]["volumes"])
    config = load_config(None, variables())
    assert mounted == {"tape": str(config.data_dir), "models": variables()["TOKENTAPE_CACHE"]}
    assert set(mounted) <= set(COMPOSE["volumes"])


def test_health_checks_ask_paths_that_exist() -> None:
    from gateway.api.http import HANDLERS

    paths = {path for handler in HANDLERS for path in handler.paths}
    asked = re.findall(r"127\.0\.0\.1:8000(/\w+)", DOCKERFILE + (ROOT / "compose.yaml").read_text())
    assert sorted(asked) == ["/health", "/ready", "/ready"]
    assert set(asked) <= paths


@pytest.mark.parametrize("name", ["gateway", "east", "west"])
def test_the_grace_period_outlasts_the_drain(name: str) -> None:
    grace = int(COMPOSE["services"][name]["stop_grace_period"].removesuffix("s"))
    assert grace > Config().server.drain_s


@pytest.mark.parametrize("service", ["gateway", "ui", "east", "west", "engine"])
def test_services_have_health_checks(service: str) -> None:
    assert COMPOSE["services"][service]["healthcheck"]["test"][0] == "CMD"


def test_prometheus_scrapes_the_gateway() -> None:
    scraped = yaml.safe_load(COMPOSE["configs"]["prometheus"]["content"])["scrape_configs"]
    gateways = [name for name, service in COMPOSE["services"].items() if is_gateway(service)]
    assert scraped[0]["static_configs"][0]["targets"] == [f"{name}:8000" for name in gateways]


# --- the profile `fleet` ---

MEMBERS = ("east", "west")


def is_gateway(service: dict[str, Any]) -> bool:
    """Whether it runs the image with its own command, which serves."""
    return service.get("image") == "tokentape" and "command" not in service


def config_of(name: str) -> Config:
    """The settings that a service's environment makes, on top of the image's."""
    keys = ("TOKENTAPE_FLEET", "TOKENTAPE_LOGS", "TOKENTAPE_MODELS")
    given = {k: v for k, v in COMPOSE["services"][name]["environment"].items() if k.startswith(keys)}
    return load_config(None, {**variables(), **given})


def test_the_profile_has_what_a_fleet_needs() -> None:
    services = {n for n, s in COMPOSE["services"].items() if "fleet" in s.get("profiles", ())}
    assert services == {*MEMBERS, "engine", "balancer", "prometheus", "grafana"}


def test_one_member_rules_and_the_other_follows_it() -> None:
    east, west = (config_of(name).fleet for name in MEMBERS)
    assert (east.name, west.name) == MEMBERS
    assert east.control is None
    assert west.control == "http://east:8000"
    assert east.key_env in COMPOSE["services"]["west"]["environment"]


@pytest.mark.parametrize("name", MEMBERS)
def test_members_have_their_large_model_on_the_engine(name: str) -> None:
    given = COMPOSE["services"][name]["environment"]
    assert given["TOKENTAPE_REMOTE_ENGINE"] == "openai"
    assert given["TOKENTAPE_REMOTE_BASE_URL"] == f"http://engine:{Config().server.port}"
    assert given["TOKENTAPE_REMOTE_API_KEY_ENV"] in COMPOSE["services"]["engine"]["environment"]


def test_members_share_a_folder_and_nothing_else_that_they_write() -> None:
    mounted = {
        name: dict(volume.split(":")[::-1] for volume in COMPOSE["services"][name]["volumes"])
        for name in (*MEMBERS, "engine", "gateway")
    }
    for name in MEMBERS:
        config = config_of(name)
        assert mounted[name][str(config.fleet.share)] == "share"
        assert mounted[name][str(config.data_dir)] == name
    assert len({folders["/data"] for folders in mounted.values()}) == len(mounted)
    assert {volume for folders in mounted.values() for volume in folders.values()} == set(COMPOSE["volumes"])


def test_the_share_can_be_written_by_the_images_user() -> None:
    (made,) = [line for line in instructions("RUN") if "useradd" in line]
    folders = {"/data", "/cache", "/share"}
    assert folders <= set(re.findall(r"/\w+", made.split("mkdir")[1].split("&&")[0]))
    assert folders <= set(made.split("chown tokentape")[1].split())


def test_the_balancer_keeps_a_user_on_one_gateway_and_streams() -> None:
    content = COMPOSE["configs"]["balancer"]["content"].replace("$$", "$")
    assert re.findall(r"server (\w+:\d+)", content) == [f"{name}:8000" for name in MEMBERS]
    (key,) = re.findall(r"hash \$(\w+) consistent;", content)
    assert f"map $http_x_user_id ${key}" in content
    assert "proxy_buffering off;" in content
    (seconds,) = re.findall(r"proxy_read_timeout (\d+)s;", content)
    assert int(seconds) > Config().server.request_timeout_s
    (mib,) = re.findall(r"client_max_body_size (\d+)m;", content)
    assert int(mib) == Config().server.max_body_mib
    listens, published = re.findall(r"listen (\d+);", content), COMPOSE["services"]["balancer"]["ports"]
    assert published == [f"{port}:{port}" for port in listens]
    assert content.count("{") == content.count("}")
    # A dollar sign that is not doubled would be a variable of compose's own.
    assert not re.search(r"(?<!\$)\$(?!\$)\w", COMPOSE["configs"]["balancer"]["content"].replace("$$", "\0"))


def test_grafana_shows_the_dashboard_of_this_repository() -> None:
    configs = COMPOSE["configs"]
    assert (ROOT / configs["grafana-dashboard"]["file"]).resolve() == ROOT / "alerts" / "grafana.json"
    (source,) = yaml.safe_load(configs["grafana-prometheus"]["content"])["datasources"]
    dashboard = json.loads((ROOT / "alerts" / "grafana.json").read_text(encoding="utf-8"))
    (variable,) = [v for v in dashboard["templating"]["list"] if v["type"] == "datasource"]
    assert source["type"] == variable["query"] == "prometheus"
    (provider,) = yaml.safe_load(configs["grafana-dashboards"]["content"])["providers"]
    targets = {c["source"]: c["target"] for c in COMPOSE["services"]["grafana"]["configs"]}
    assert Path(targets["grafana-dashboard"]).parent == Path(provider["options"]["path"])
    assert set(targets) <= set(configs)


def test_only_the_balancer_is_published_beyond_loopback() -> None:
    open_to_all = {
        name
        for name, service in COMPOSE["services"].items()
        for port in service.get("ports", ())
        if not port.startswith("127.0.0.1:")
    }
    assert open_to_all == {"gateway", "balancer"}
