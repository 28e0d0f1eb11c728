"""Kernels whose machine code can't be kept on disk are compiled without it."""

import ast
import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest

import exegpt
from exegpt.kernels import numba_jit

KERNELS = Path(exegpt.__file__).parent.parent / "kernels"
SOURCE = """
from exegpt.kernels.numba_jit import njit

@njit(["int64(int64)"], cache=True)
def double(number):
    return 2 * number
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """What imports a file with a cached kernel, whose cache is in the folder `cache`."""
    from numba.core import config

    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "doubling.py").write_text(SOURCE)
    numba_jit._tell.cache_clear()

    def imported():
        spec = importlib.util.spec_from_file_location("doubling", tmp_path / "doubling.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.double

    return imported


def test_a_cache_without_a_place_is_left_out_and_named_once(load, monkeypatch, capsys):
    from numba.core import caching

    def refuse(self):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(caching._CacheLocator, "ensure_cache_path", refuse)
    assert load()(21) == load()(21) == 42
    assert capsys.readouterr().err.count("set NUMBA_CACHE_DIR to a writable folder") == 1


def test_a_torn_cache_is_left_out(load, tmp_path, capsys):
    assert load()(21) == 42 and capsys.readouterr().err == ""
    indices = list((tmp_path / "cache").rglob("*.nbi"))
    assert indices
    for index in indices:
        index.write_bytes(b"torn")
    assert load()(21) == 42
    assert "every start compiles them again" in capsys.readouterr().err


def test_what_the_cache_is_not_to_blame_for_is_raised(load, tmp_path):
    (tmp_path / "doubling.py").write_text(SOURCE.replace("2 * number", "number.nothing"))
    with pytest.raises(Exception, match="nothing"):
        load()


def test_a_function_does_not_take_over_its_callers_fast_arithmetic():
    """Otherwise NaN is finite wherever the first caller assumes that there is none."""

    @numba_jit.njit
    def finite(x):
        return np.isfinite(x)

    @numba_jit.njit(fastmath=True)
    def first_caller(x):
        return finite(x)

    assert not first_caller(math.nan) and not finite(math.nan)


def test_all_cached_kernels_go_without_their_cache_where_they_must():
    for file in KERNELS.glob("*.py"):
        tree = ast.parse(file.read_text())
        cached = any(isinstance(node, ast.keyword) and node.arg == "cache" for node in ast.walk(tree))
        imports = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not cached or "exegpt.kernels.numba_jit" in imports, file.name
