"""Runs a program that a model wrote: own process and folder, limits on time, memory and files, no network.

Good against accidents and clumsy code, not against an attacker: evaluate models you trust that far.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
from importlib import resources

CPU_S = 5
"""Processor time a program may use; wall time is twice as long, since the machine may be busy."""

MEMORY_MIB = 1024
FILE_MIB = 1


def passes(program: str, cpu_s: int = CPU_S) -> bool:
    """Whether the program runs to its end without an error, within the limits."""
    child = resources.files("gateway.tuning.tasks").joinpath("sandbox_child.py").read_text(encoding="utf-8")
    # Only the child knows the word, and says it once the program is through: exit(0) is not enough.
    word = secrets.token_hex(16)
    order = {
        "program": program,
        "word": word,
        "cpu_s": cpu_s,
        "memory": MEMORY_MIB * 2**20,
        "file": FILE_MIB * 2**20,
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-B", "-c", child],
                input=json.dumps(order).encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={},
                timeout=2 * cpu_s + 1,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0 and done.stdout == word.encode()
