"""Prompts that anyone can make again: functions of Python's own library, told by signature and docstring.

    python -m gateway.tuning.stdlib_prompts prompts.jsonl --num 450

The library (PSF licence) is on every machine that runs this; the same Python version gives the same file.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

INSTRUCTION = "Write this Python function. Reply with code only, no docstring, no comments.\n\n{stub}"
SHORTEST, LONGEST = 40, 160
"""Length in characters of a docstring that says enough and not too much."""

LEFT_OUT = frozenset({"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages"})
"""Folders that are no library, or not Python's own."""


def stubs(root: Path) -> Iterator[tuple[str, str]]:
    """(dotted name, signature and docstring) of the public functions of the modules under `root`."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if LEFT_OUT & set(parts):
            continue
        for node in ast.parse(path.read_bytes()).body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            doc = ast.get_docstring(node)
            if doc is not None and SHORTEST <= len(doc) <= LONGEST:
                node.body, node.decorator_list = [ast.Expr(ast.Constant(doc))], []
                yield ".".join((*parts, node.name)), ast.unparse(node)


def lines(root: Path, num: int) -> list[str]:
    """`num` JSON lines in the order of their hashes, each function once; raises ValueError where too few."""
    found = {stub: name for name, stub in stubs(root)}
    if len(found) < num:
        raise ValueError(f"there are {len(found)} functions with a docstring, not {num}")
    order = sorted(found, key=lambda stub: hashlib.sha256(stub.encode()).digest())
    return [
        json.dumps({"id": found[stub], "kind": "code", "prompt": INSTRUCTION.format(stub=stub)})
        for stub in order[:num]
    ]


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--num", type=int, default=450, help="how many (default 450)")
    arguments = parser.parse_args()
    root = Path(sysconfig.get_paths()["stdlib"])
    arguments.out.write_text("".join(f"{line}\n" for line in lines(root, arguments.num)), "utf-8")


if __name__ == "__main__":
    main()
