"""Shares of a GPU's multiprocessors, by a driver of this file's."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from xmulti.rank.multiprocessors import Unavailable, shared_out, streams_on_shares

CUDA = torch.device("cuda", 1)


@example([2, 7, 10], 15)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=6), st.integers(6, 60))
def test_shares_that_fit_are_disjoint(tenths, groups):
    shares = [tenth / 10 for tenth in tenths]
    places = shared_out(shares, groups)
    for share, own in zip(shares, places, strict=True):
        assert len(set(own)) == len(own) and abs(len(own) - share * groups) <= 1 + 1e-9 and own
    taken = [place for own in places for place in own]
    assert set(taken) <= set(range(groups))
    if sum(tenths) <= 10 and groups >= 10:
        assert len(set(taken)) == len(taken)
    if sum(tenths) >= 10:
        assert set(taken) == set(range(groups)), "those that exceed the device overlap no sooner than they must"


def test_a_share_of_nearly_nothing_has_a_group():
    assert shared_out([0.001, 0.999], 10) == [[0], list(range(10))]


class Driver(ModuleType):
    """132 multiprocessors, split into groups of 8."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM="multiprocessors")
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM="default")
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING="by itself")

    def __init__(self):
        super().__init__("cuda.bindings.driver")
        self.made = []

    def cuDeviceGet(self, index):
        return 0, f"device {index}"

    def cuDeviceGetDevResource(self, device, kind):
        assert (device, kind) == ("device 1", "multiprocessors")
        return 0, SimpleNamespace(sm=SimpleNamespace(smCount=132))

    def cuDevSmResourceSplitByCount(self, most, whole, flags, least):
        assert most == whole.sm.smCount and (flags, least) == (0, 1)
        return 0, [f"group {place}" for place in range(most)], 16, "remaining"

    def cuDevResourceGenerateDesc(self, resources, count):
        assert count == len(resources)
        return 0, tuple(resources)

    def cuGreenCtxCreate(self, description, device, flags):
        assert (device, flags) == ("device 1", "default")
        self.made.append(description)
        return 0, len(self.made)

    def cuGreenCtxStreamCreate(self, context, flags, priority):
        assert (flags, priority) == ("by itself", 0)
        return 0, 100 + context


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", ModuleType("cuda.bindings"))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", made)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda pointer, device: (pointer, device))
    return made


def test_each_share_has_a_stream_on_groups_of_one_split(driver):
    assert streams_on_shares(CUDA, [0.25, 0.5, 0.25]) == [(101, CUDA), (102, CUDA), (103, CUDA)]
    assert [len(groups) for groups in driver.made] == [4, 8, 4]
    assert sorted(sum(driver.made, ())) == sorted(f"group {place}" for place in range(16))


def test_a_driver_that_refuses_is_named(driver):
    driver.cuGreenCtxCreate = lambda *_: (SimpleNamespace(name="CUDA_ERROR_NOT_SUPPORTED"), None)
    with pytest.raises(Unavailable, match="cuGreenCtxCreate returns CUDA_ERROR_NOT_SUPPORTED"):
        streams_on_shares(CUDA, [1.0])


def test_an_old_driver_is_named(driver):
    def missing(*_):
        raise RuntimeError('Function "cuDeviceGetDevResource" not found')

    driver.cuDeviceGetDevResource = missing
    with pytest.raises(Unavailable, match="this CUDA driver has no cuDeviceGetDevResource"):
        streams_on_shares(CUDA, [1.0])


def test_a_cpu_has_none(driver):
    with pytest.raises(Unavailable, match="device cpu has no multiprocessors"):
        streams_on_shares(torch.device("cpu"), [1.0])


def test_the_package_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(Unavailable, match="cuda-bindings"):
        streams_on_shares(CUDA, [1.0])


def test_the_real_bindings_have_what_is_asked_for():
    """Without a driver: their names alone."""
    real = pytest.importorskip("cuda.bindings.driver")
    for name in (name for name in vars(Driver) if name.startswith("cu")):
        assert callable(getattr(real, name))
    assert real.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM and hasattr(real.CUdevResource(), "sm")
    assert real.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM and real.CUstream_flags.CU_STREAM_NON_BLOCKING
    assert importlib.import_module("cuda.bindings.driver").CUresult.CUDA_SUCCESS == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_the_real_bindings_say_that_there_is_no_driver():
    pytest.importorskip("cuda.bindings.driver")
    with pytest.raises(Unavailable, match="this CUDA driver has no cuDeviceGet"):
        streams_on_shares(CUDA, [1.0])
