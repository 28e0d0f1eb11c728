"""Messages between ranks come as they were sent, and name nothing but what may be sent."""

from dataclasses import dataclass, fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

import xcore.requests.request
from tests.xcore.small_specs import schedule
from xcore.policies import TRAITS
from xcore.requests.message import pack, unpack
from xcore.requests.request import Request, Result
from xcore.specs.request_times import RequestTimes
from xcore.specs.schedule import Schedule, Stage
from xcore.specs.timeline import Timeline
from xrunner.comm.kv_transfer import KVArrival
from xrunner.core.run_report import RunReport
from xrunner.rank.assembly import DeviceBatch

KINDS = (DeviceBatch, KVArrival, Result)


def sent(what):
    return unpack(bytearray(pack(what)), KINDS)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False), st.tuples))
def test_plain_values(what):
    assert sent(what) == what


@given(
    arrays(
        st.sampled_from(["<i4", "<i8", "<f4"]), array_shapes(min_dims=1, max_dims=3, min_side=0), elements=st.just(3)
    )
)
def test_arrays_between_others(array):
    first, received, last = sent((np.arange(3, dtype=np.int32), array, np.arange(5)))
    np.testing.assert_array_equal(received, array)
    assert received.dtype == array.dtype and received.shape == array.shape and received.flags.writeable
    assert first.tolist() == [0, 1, 2] and last.tolist() == [0, 1, 2, 3, 4]


def test_what_ranks_send():
    array = np.arange(4)
    part = (0, np.int64(4), array.astype(np.int32)[None], array.astype(np.int32), array.astype(np.int32))
    batch = DeviceBatch(
        "mixed", 1, 3, 4, array, array, array, (part,), None, 2, array, (array.astype(np.float32), array)
    )
    received = sent(batch)
    for field in fields(DeviceBatch):
        np.testing.assert_equal(getattr(received, field.name), getattr(batch, field.name))
    result = Result("é", 3, (1, 2), "stop", 0.0, 0.5, None, 1.25)
    assert sent(result) == result
    assert sent(KVArrival(7, array)).places.tolist() == array.tolist()


@pytest.mark.parametrize("policy", TRAITS)
def test_a_schedule_with_the_record_of_any_policy(policy):
    layers = (0, 12)
    apart = (Stage((0,), 1, "encode", None, layers), Stage((1,), 1, "decode", None, layers))
    plan = schedule(policy, **({"stages": apart} if TRAITS[policy].disaggregated else {}))
    assert unpack(bytearray(pack(plan)), (Schedule,)) == plan


def test_another_kind_is_refused():
    @dataclass
    class Other:
        x: int

    with pytest.raises(KeyError, match="Other"):
        sent(Other(1))


def test_dicts_and_the_kinds_of_fields():
    request = Request("a", (1, 2), 3)
    named = {("decode", 3): {"of": (request,), "pairs": None}, "kind": np.arange(2)}
    received = unpack(bytearray(pack(named)), (Request,))
    assert received[("decode", 3)] == named[("decode", 3)] and received["kind"].tolist() == [0, 1]
    report = RunReport((), (RequestTimes(0, 1, 2, 0.0, 0.1, 0.2, 0.3),), Timeline("measured", ()), 0.5)
    assert unpack(bytearray(pack(report)), (RunReport,)) == report


def test_two_kinds_of_one_name_are_refused():
    @dataclass
    class Request:
        x: int

    with pytest.raises(TypeError, match="called Request"):
        unpack(bytearray(pack(())), (Request, xcore.requests.request.Request))
