"""Engines by name, and the time that they add."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcore.document import from_dict, to_dict
from xcore.errors import InputError
from xcore.specs.engine_memory import OWN_ON_GPU
from xcore.specs.engine_spec import ENGINES, EngineSpec, LinkWait, find_engine


def test_an_unknown_engine_is_refused_with_the_list():
    known = "tensorrt-llm, vllm, vllm-0.11, sglang, exegpt, paper, none"
    with pytest.raises(InputError, match=re.escape(f"no engine 'triton': use one of {known}")):
        find_engine("triton")


def test_our_engine_decides_synchronously_and_takes_its_own_memory():
    ours, theirs = find_engine("exegpt"), find_engine("vllm")
    assert (ours.in_flight, theirs.in_flight) == (1, 2) and ours.memory == OWN_ON_GPU
    assert ours.iteration_s + 64 * ours.sequence_s == pytest.approx(0.29e-3, rel=0.02), "on an H100"
    assert (ours.sort_s, ours.sort_sequence_s) == (0.33e-3, 0.0), "one program for each row"


def test_the_papers_engine_and_none_add_nothing():
    for name in ("paper", "none"):
        engine = find_engine(name)
        assert (engine.wait_s, engine.clock, engine.iteration_s, engine.sequence_s) == (0.0, 1.0, 0.0, 0.0)


def test_an_engines_own_time_is_linear_in_sequences():
    engine = EngineSpec("e", iteration_s=2e-3, sequence_s=4e-6)
    for sequences in (0, 1, 77, 4096, 20000):
        assert engine.overhead(1e-3)(sequences) == pytest.approx(3e-3 + 4e-6 * sequences)
    assert EngineSpec("e", iteration_s=2e-3).overhead()(50) == 2e-3


@pytest.mark.parametrize(
    "wrong",
    [
        {"clock": 0.0},
        {"clock": 1.1},
        {"wait_s": -1e-6},
        {"iteration_s": float("nan")},
        {"front_end_s": -1e-3},
        {"in_flight": 0},
        {"in_flight": 3},
        {"waits": (LinkWait(1e11, ((2, -1e-6),)),)},
    ],
)
def test_what_no_engine_can_be_is_refused(wrong):
    with pytest.raises(InputError, match="Engine 'e'"):
        EngineSpec("e", **wrong)


def test_a_wait_depends_on_the_link_and_on_the_degree():
    nvlink, pcie = (
        LinkWait(
            1e11,
            (
                (2, 4e-6),
                (4, 9e-6),
                (8, 12e-6),
            ),
        ),
        LinkWait(0.0, ((2, 30e-6),)),
    )
    engine = EngineSpec("e", waits=(pcie, nvlink))
    assert [engine.wait(2.9e11, tp) for tp in (1, 2, 4, 8, 16)] == [0.0, 4e-6, 9e-6, 12e-6, 12e-6]
    assert engine.wait(2.9e11, 6) == pytest.approx(9e-6 + 3e-6 * 0.585, rel=1e-3)
    assert [engine.wait(2e10, tp) for tp in (1, 2, 8)] == [0.0, 30e-6, 30e-6]
    assert EngineSpec("e", wait_s=7e-6, waits=(nvlink,)).wait(2e10, 4) == 7e-6


def test_vllms_presets_differ_in_what_asynchronous_scheduling_changes():
    new, old = find_engine("vllm"), find_engine("vllm-0.11")
    assert (new.in_flight, new.iteration_s, new.sequence_s) == (2, 0.3e-3, 10e-6)
    assert (old.in_flight, old.iteration_s, old.sequence_s) == (1, 1.03e-3, 0.0)
    assert new.waits == old.waits and new.front_end_s == old.front_end_s == 7e-3


@pytest.mark.parametrize("degrees", [(), ((1, 1e-6),)])
def test_a_wait_of_no_degree_is_refused(degrees):
    with pytest.raises(InputError, match="degrees of at least 2"):
        LinkWait(0.0, degrees)


def test_ranks_do_not_wait_twice_beside_a_measured_all_reduce():
    assert EngineSpec("e", wait_s=7e-6, waits=(LinkWait(1e11, ((2, 4e-6),)),)).wait_beside_measured_s == 0.0
    assert EngineSpec("e", wait_s=7e-6).wait_beside_measured_s == 7e-6


@given(st.dictionaries(st.integers(2, 64), st.floats(0, 1e-4), min_size=1), st.integers(2, 128))
def test_a_wait_between_two_degrees_lies_between_theirs(by_degree, tp):
    seconds = LinkWait(0.0, tuple(by_degree.items())).seconds(tp)
    around = {max((n for n in by_degree if n <= tp), default=min(by_degree))}
    around.add(min((n for n in by_degree if n >= tp), default=max(by_degree)))
    least, most = (bound(by_degree[n] for n in around) for bound in (min, max))
    assert least * (1 - 1e-9) <= seconds <= most * (1 + 1e-9)
    assert seconds == by_degree.get(tp, seconds)


def test_sorting_takes_time_by_rows_vocabulary_and_bandwidth():
    engine = EngineSpec("e", sort_s=3e-4, sort_sequence_s=9e-6)
    assert engine.sorting(10, 128_256, 3.35e12) == pytest.approx(3e-4 + 90e-6)
    assert engine.sorting(10, 64_128, 6.7e12) == pytest.approx(3e-4 + 22.5e-6)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_is_found_by_name_and_round_trips_through_json(name):
    engine = find_engine(name)
    assert engine.name == name and from_dict(EngineSpec, to_dict(engine), "it") == engine
