"""`tokentape rollout`: a canary from the shell; talks to a running gateway."""

from __future__ import annotations

import argparse
import json
from typing import Any
from urllib.parse import quote

from gateway.config import ConfigError
from gateway.remote import ask, data_dir_of, running_gateway

ACTIONS = {
    "promote": "make the canary stable, proven or not",
    "abort": "everything back to stable",
    "pause": "hold the weight",
    "resume": "go on",
}


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("rollout", help="canary rollouts of a running gateway")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    start = verbs.add_parser("start", help="start a canary of a policy")
    start.add_argument("name", metavar="NAME")
    start.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="policy key of the canary; may be repeated",
    )
    start.add_argument("--weight", type=float, metavar="W", help="share of users at first, such as 0.05")
    start.add_argument("--steps", metavar="W,...", help="weights to go through, such as 0.05,0.25,0.5")
    start.add_argument("--margin", type=float, metavar="M", help="how much worse is still not worse")
    start.add_argument("--min-units", type=int, metavar="N", help="users a step must have seen")
    _common(start, _start)
    status = verbs.add_parser("status", help="one rollout, or all")
    status.add_argument("name", nargs="?", metavar="NAME")
    _common(status, _status)
    for action, text in ACTIONS.items():
        verb = verbs.add_parser(action, help=text)
        verb.add_argument("name", metavar="NAME")
        _common(verb, _act, action=action)


def _common(parser: argparse.ArgumentParser, run: Any, **more: Any) -> None:
    parser.add_argument("--url", metavar="U", help="the gateway; by default the one that holds the tape")
    parser.add_argument("--data-dir", metavar="D", help="folder of the gateway's tape")
    parser.set_defaults(run=run, **more)


def _start(arguments: argparse.Namespace) -> int:
    body: dict[str, Any] = {"name": arguments.name, "canary": dict(map(_pair, arguments.set))}
    if arguments.steps is not None:
        try:
            body["steps"] = [float(part) for part in arguments.steps.split(",")]
        except ValueError:
            raise ConfigError(f"--steps: {arguments.steps!r} is not a list of weights") from None
    for name in ("weight", "margin", "min_units"):
        if getattr(arguments, name) is not None:
            body[name] = getattr(arguments, name)
    found = ask(_url(arguments), "POST", "/v1/rollouts", body=body)
    _show(found)
    print(f"until a verdict: {json.dumps(found['estimate'])}")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    url = _url(arguments)
    if arguments.name is not None:
        _show(ask(url, "GET", f"/v1/rollouts/{quote(arguments.name, safe='')}"))
        return 0
    rollouts = ask(url, "GET", "/v1/rollouts")["data"]
    for rollout in rollouts:
        _show(rollout)
    if not rollouts:
        print("no rollouts")
    return 0


def _act(arguments: argparse.Namespace) -> int:
    _show(ask(_url(arguments), "POST", f"/v1/rollouts/{quote(arguments.name, safe='')}/{arguments.action}"))
    return 0


def _show(rollout: dict[str, Any]) -> None:
    units = rollout["units"]
    paused = ", paused" if rollout["paused"] else ""
    print(
        f"{rollout['name']}: {rollout['verdict']}{paused}, weight {rollout['weight']:g}, "
        f"step {rollout['step']}, units stable {units['stable']} canary {units['canary']}"
    )
    for metric, evidence in rollout["evidence"].items():
        print(
            f"    {metric}: against {evidence['against']:.3g}, for {evidence['for']:.3g}, "
            f"limit {evidence['limit']:.3g}"
        )


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--set: {text!r} is not KEY=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _url(arguments: argparse.Namespace) -> str:
    url = arguments.url or running_gateway(data_dir_of(arguments.data_dir))
    if url is None:
        raise ConfigError("--url: no gateway runs on this tape; name one")
    found: str = url
    return found
