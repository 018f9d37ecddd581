"""The one-way dependencies, read off the source: policy/core <- engine <- worker <- api/app."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("gateway", "logs", "alerts", "replay_ui")
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


@cache
def imports(module: str) -> frozenset[str]:
    """Everything a module imports, anywhere in its source, with full dotted names of our own modules."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            name = ".".join([*start, *([node.module] if node.module else [])])
            # `from gateway import policy` names a module, `from gateway.policy import decide` does not.
            found |= {f"{name}.{a.name}" if f"{name}.{a.name}" in MODULES else name for a in node.names}
    return frozenset(found)


@cache
def reachable(module: str) -> frozenset[str]:
    """All that is loaded when the module is: ours in depth, others' top-level packages by name."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        for name in imports(todo.pop()):
            ours = name in MODULES
            key = name if ours else name.split(".")[0]
            if key not in seen:
                seen.add(key)
                if ours:
                    todo.append(name)
    return frozenset(seen)


def within(package: str) -> list[str]:
    return [m for m in MODULES if m == package or m.startswith(package + ".")]


ENGINE = {
    f"gateway.{m}"
    for m in (
        "engine",
        "rounds",
        "admission",
        "commit",
        "labels",
        "tier",
        "local",
        "models",
        "row",
        "steps",
        "sampling",
        "cache",
        "scheduler",
        "accept",
    )
}
TORCH_FREE = ("gateway.core", "gateway.policy", "gateway.replay", "alerts.sequential", "alerts.evidence")


@pytest.mark.parametrize("module", TORCH_FREE)
def test_the_pure_modules_load_no_framework(module: str) -> None:
    assert not reachable(module) & {"torch", "transformers", "litestar", "duckdb", "streamlit", "uvicorn"}


def test_core_and_policy_depend_on_nothing_but_each_other() -> None:
    assert {name for name in imports("gateway.core") if name in MODULES} == set()
    assert {name for name in imports("gateway.policy") if name in MODULES} == {
        "gateway.core",
        "gateway.router",
    }
    assert {name for name in imports("gateway.router") if name in MODULES} == {"gateway.core"}


@pytest.mark.parametrize("module", sorted(within("logs") + within("alerts")))
def test_logs_and_alerts_never_import_the_engine(module: str) -> None:
    assert not imports(module) & (ENGINE | {"gateway.worker", "gateway.app", "torch", "transformers"})
    assert not [name for name in imports(module) if name.startswith("gateway.api")]


@pytest.mark.parametrize("module", sorted(within("replay_ui")))
def test_the_ui_imports_only_policy_and_core_of_the_gateway(module: str) -> None:
    allowed = {"gateway", "gateway.policy", "gateway.core", "gateway.router"}
    ours = {n for n in imports(module) if n.split(".")[0] in ("gateway", "logs", "alerts")}
    assert ours <= allowed


@pytest.mark.parametrize("module", sorted(m for m in within("gateway") if m in ENGINE))
def test_the_engine_knows_neither_its_worker_nor_the_service(module: str) -> None:
    above = ("gateway.worker", "gateway.api", "gateway.app", "gateway.cli", "gateway.config", "gateway.wire")
    assert not [n for n in reachable(module) if n.startswith(above)]
    assert not reachable(module) & {"litestar", "uvicorn", "duckdb", "streamlit", "prometheus_client"}
    assert not [n for n in reachable(module) if n.split(".")[0] in ("logs", "alerts", "replay_ui")]


def test_the_worker_knows_nothing_of_the_service() -> None:
    assert not [
        n for n in reachable("gateway.worker") if n.startswith(("gateway.api", "gateway.app", "logs"))
    ]
    assert "litestar" not in reachable("gateway.worker")


def test_only_composition_roots_import_the_api() -> None:
    roots = {m for m in MODULES if m == "gateway.app" or m.startswith(("gateway.cli", "gateway.api"))}
    others = [m for m in MODULES if m not in roots]
    assert not [m for m in others if any(n.startswith("gateway.api") for n in imports(m))]


def test_nothing_in_the_product_imports_the_tests() -> None:
    tests = {path.stem for path in (ROOT / "tests").glob("*.py")} | {"tests", "pytest", "hypothesis"}
    assert not {m: imports(m) & tests for m in MODULES if imports(m) & tests}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_two_modules_import_each_other_in_a_circle(package: str) -> None:
    circles = [m for m in within(package) if m in reachable(m)]
    assert circles == []
