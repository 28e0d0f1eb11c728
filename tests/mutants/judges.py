"""Which tests judge a mutant: those that reach the line that it changes, the nearest and shortest first."""

import ast
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.mutants.reached import Reached

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "xcore/batching",
    "xcore/policies",
    "xsimulator/cost",
    "xsimulator/replay",
    "xsimulator/steady",
    "xscheduler",
    "xmulti/sharing",
)
"""Folders whose modules are changed."""
MOST_S, MOST = 25.0, 250
"""Most CPU seconds and most tests, of those beside the module and of the others each."""


def tests_of(path: str, line: int, reached: Reached, code: str) -> list[list[str]]:
    """Tests of a line: those of the folder that mirrors the module's, then others; each group shortest first.

    A line that only runs when its module is imported is judged by the tests that reach the function or class around it,
    or else by those that reach the module.
    """
    found = next(filter(None, (reached.tests(path, *lines) for lines in _around(code, line))), set())
    beside = f"tests/{Path(path).parent.as_posix()}/"
    near = {name for name in found if name.startswith(beside)}
    return [tests for some in (near, found - near) if (tests := _shortest(some, reached))]


def _around(code: str, line: int) -> Iterable[tuple[int, int]]:
    """First and last lines of a line's statement, of each block around it, innermost first, and of the module."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.stmt | ast.ExceptHandler)]
    inside = [node for node in nodes if node.lineno <= line <= (node.end_lineno or node.lineno)]
    inside.sort(key=lambda node: (node.end_lineno or node.lineno) - node.lineno)
    for node in inside[:1]:
        body = getattr(node, "body", None)
        yield node.lineno, body[0].lineno - 1 if body else node.end_lineno or node.lineno
    for node in inside:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.end_lineno or node.lineno
    yield 1, sys.maxsize


def _shortest(names: Iterable[str], reached: Reached) -> list[str]:
    chosen, total = [], 0.0
    for name in sorted(names, key=lambda name: (reached.seconds[name], name))[:MOST]:
        total += reached.seconds[name]
        if chosen and total > MOST_S:
            break
        chosen.append(name)
    return chosen
