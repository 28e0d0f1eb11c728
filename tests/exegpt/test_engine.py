"""Engines by name, and the time that they add."""

import pytest

from exegpt.document import from_dict, to_dict
from exegpt.engine import ENGINES, EngineSpec, find_engine
from exegpt.errors import InputError


def test_an_unknown_engine_is_refused_with_the_list():
    with pytest.raises(InputError, match=r"no engine 'sglang': use one of tensorrt-llm, vllm, paper, none\.$"):
        find_engine("sglang")


def test_the_papers_engine_and_none_add_nothing():
    for name in ("paper", "none"):
        engine = find_engine(name)
        assert (engine.wait_s, engine.clock, engine.iteration_s, engine.sequence_s) == (0.0, 1.0, 0.0, 0.0)


def test_an_engines_own_time_is_linear_in_sequences():
    engine = EngineSpec("e", iteration_s=2e-3, sequence_s=4e-6)
    for sequences in (0, 1, 77, 4096, 20000):
        assert engine.overhead(1e-3)(sequences) == pytest.approx(3e-3 + 4e-6 * sequences)
    assert EngineSpec("e", iteration_s=2e-3).overhead()(50) == 2e-3


@pytest.mark.parametrize("wrong", [{"clock": 0.0}, {"clock": 1.1}, {"wait_s": -1e-6}, {"iteration_s": float("nan")}])
def test_what_no_engine_can_be_is_refused(wrong):
    with pytest.raises(InputError, match="Engine 'e'"):
        EngineSpec("e", **wrong)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_is_found_by_name_and_round_trips_through_json(name):
    engine = find_engine(name)
    assert engine.name == name and from_dict(EngineSpec, to_dict(engine), "it") == engine
