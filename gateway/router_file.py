"""A learned router in a safetensors file: float32 tensors named as the fields of gateway.router.Router."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gateway.router import FEATURES, Router


def save_router(path: Path, router: Router) -> None:
    """Write a router; its features are named in the file's metadata."""
    tensors = {
        "mean": _array(router.mean),
        "scale": _array(router.scale),
        "hidden": np.array(router.hidden, dtype=np.float32).reshape(-1, len(router.mean)),
        "hidden_bias": _array(router.hidden_bias),
        "output": _array(router.output),
        "bias": _array((router.bias,)),
        "probe": _array(router.probe),
    }
    save_file(tensors, path, metadata={"features": json.dumps(FEATURES)})


def load_router(path: Path) -> Router:
    """Read a router. Raises ValueError, in one line, for what is none or reads other features."""
    try:
        with safe_open(path, framework="numpy") as file:
            features = json.loads((file.metadata() or {}).get("features", "null"))
            tensors = {name: file.get_tensor(name).astype(np.float32).tolist() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as safetensors: {str(error).splitlines()[0]}") from None
    if features != list(FEATURES):
        raise ValueError(f"{path}: reads the features {features}, this version has {list(FEATURES)}")
    try:
        (bias,) = tensors.pop("bias")
    except (KeyError, ValueError, TypeError):
        raise ValueError(f"{path}: `bias` must hold one number") from None
    return Router.of({**tensors, "bias": bias})


def _array(values: tuple[float, ...]) -> np.ndarray:
    return np.array(values, dtype=np.float32)
