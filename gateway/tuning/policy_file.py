"""policy.toml: a calibrated policy and its guarantee, as `serve --config` takes them."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from gateway.config import Calibration
from gateway.policy import Policy
from gateway.router_file import save_router

ALWAYS = ("accept", "threshold", "draft_length")
"""Keys that are written even where they are the defaults."""


def write_policy(path: Path, name: str, policy: Policy, calibration: Calibration) -> list[Path]:
    """Write the file, and its router beside it; returns what was written."""
    written = [path]
    lines = [f"[policy.{name}]"]
    default = Policy()
    for field in fields(Policy):
        value = getattr(policy, field.name)
        if field.name == "router":
            if value is not None:
                file = path.with_suffix(".router.safetensors")
                save_router(file, value)
                written.append(file)
                lines.append(f"router = {_toml(file.name)}")
        elif field.name in ALWAYS or value != getattr(default, field.name):
            lines.append(f"{field.name} = {_toml(value)}")
    lines += ["", f"[calibration.{name}]"]
    lines += [f"{key} = {_toml(value)}" for key, value in msgspec.to_builtins(calibration).items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return written


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # TOML's basic strings are JSON's, for the text that occurs here.
        return json.dumps(str(value))
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return repr(value)
