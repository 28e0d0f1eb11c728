"""Allowed imports between packages (docs/architecture.md), checked module by module."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

XCORE = {"xcore", "xcore.batching", "xcore.policies", "xcore.orders"}
SIMULATOR = {"xsimulator", "xsimulator.cost", "xsimulator.steady", "xsimulator.replay"}
RUNNER = {"xrunner", "xrunner.models", "xrunner.comm", "xrunner.rank", "xrunner.core"}
ALLOWED: dict[str, set[str] | None] = {  # package, or a part of it → those that it may import beside itself; None: all
    "exegpt.kernels": set(),
    "xcore": {"xcore.batching", "xcore.policies"},
    "xcore.batching": {"xcore"},
    "xcore.policies": {"xcore", "xcore.batching"},
    "xcore.orders": {"xcore", "xcore.batching"},
    "xsimulator": XCORE | {"xsimulator.steady", "xsimulator.replay"},
    "xsimulator.cost": {"xcore"},
    "xsimulator.steady": XCORE | {"xsimulator.cost"},
    "xsimulator.replay": XCORE | {"xsimulator.cost"},
    "xrunner": {"xcore"},
    "xrunner.models": {"xcore", "xrunner", "exegpt.kernels"},
    "xrunner.comm": {"xcore", "xrunner", "xrunner.models", "exegpt.kernels"},
    "xrunner.rank": XCORE | {"xrunner", "xrunner.models", "xrunner.comm", "exegpt.kernels"},
    "xrunner.core": XCORE | RUNNER | {"exegpt.kernels"},
    "xprofiler": XCORE | RUNNER | {"exegpt.kernels"},
    "xscheduler": XCORE | SIMULATOR | {"xprofiler"},
    "xserver": XCORE | SIMULATOR,
    "xmulti": XCORE | SIMULATOR | RUNNER | {"exegpt.kernels", "xprofiler", "xscheduler", "xserver"},
    "exegpt": set(),
    "exegpt.options": XCORE | {"xscheduler"},
    "exegpt.report": XCORE | {"xmulti"},
    "exegpt.loadtest": XCORE | {"exegpt.report", "exegpt.options"},
    "exegpt.api": None,
    "exegpt.cli": None,
    "exegpt.reproduction": XCORE | SIMULATOR | {"exegpt.report", "exegpt.api", "xprofiler", "xscheduler", "xmulti"},
}
ALLOWED["exegpt.api"] = set(ALLOWED) - {"exegpt.cli", "exegpt.reproduction"}
OUTSIDE = {
    "exegpt.kernels": {"torch", "numpy", "numba", "llvmlite", "triton"},
    "xcore.batching": {"numpy"},
    "xcore.policies": set(),
    "xcore.orders": {"numpy", "scipy"},
}
"""Rooms that may import only these packages of others."""


def room(module: str) -> str | None:
    """The room that a module is in; None for what isn't ours."""
    module = {"exegpt.__main__": "exegpt.cli"}.get(module, module)
    packages = [name for name in ALLOWED if module == name or module.startswith(name + ".")]
    return max(packages, key=len, default=None)


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from xcore import policies` names a module too
            imported.update({node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names})
    return imported


def module_name(path: Path) -> str:
    """The name by which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return f"exegpt.{name}" if parts[0] == "kernels" else name


TOPS = tuple("exegpt kernels xcore xmulti xprofiler xrunner xscheduler xserver xsimulator".split())
FILES = [path for top in TOPS for path in sorted((ROOT / top).rglob("*.py"))]


def test_there_is_something_to_read():
    assert len(FILES) > 40
    assert {room(module_name(path)) for path in FILES} == set(ALLOWED)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_only_allowed_arrows(path):
    package = room(module_name(path))
    assert package is not None
    allowed = ALLOWED[package]
    for module in imports(path):
        there = room(module)
        if there and there != package and allowed is not None:
            assert there in allowed, f"{path}: {package} must not import {module}"
        top = module.split(".")[0]
        if package in OUTSIDE and there is None and top not in OUTSIDE[package]:
            assert top in sys.stdlib_module_names, f"{path}: {package} must not import {module}"


def test_the_root_of_the_library_imports_nothing_of_ours():
    assert imports(ROOT / "exegpt" / "__init__.py") == {"importlib", "importlib.import_module"}
