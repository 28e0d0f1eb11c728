"""Functions are short enough to be seen whole, and files are short."""

import ast

import pytest

from tests.test_imports import FILES, module_name

MOST = 60
"""Lines of a function's body, its docstring left out."""
MOST_OF_FILE = 500
UNROLLED = {"_attend_prefill", "_attend_decode"}
"""Triton kernels, whose steps share too many values to be functions of their own."""


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_bodies_are_short(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name not in UNROLLED:
            first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
            lines = node.body[-1].end_lineno - first.lineno + 1
            assert lines <= MOST, f"{path}: {node.name} has {lines} lines"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_files_are_short(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MOST_OF_FILE, f"{path} has {lines} lines"
