"""Imported operators under an engine that is named later."""

from dataclasses import replace

import pytest

from xcore.errors import InputError
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.engine_spec import EngineSpec, engine_of, find_engine
from xprofiler.operators import with_engine
from xprofiler.roofline import roofline_profile

MODEL, CLUSTER = replace(builtin_model("llama-3.1-8b"), sorts_logits=True), parse_cluster("2xH100-SXM")
FACTS = {"origin": "a table", "engine": "vllm", "not_in_source": "the engine's own time; sampling"}
KERNELS = replace(roofline_profile(MODEL, CLUSTER, "bf16"), source="operators", provenance=FACTS)
SPEC = EngineSpec("none", wait_s=50e-6, clock=0.5, iteration_s=1e-3, sequence_s=2e-6, in_flight=2, front_end_s=7e-3)


def test_kernels_get_an_engines_own_time_and_keep_their_clock():
    served = with_engine(KERNELS, MODEL, CLUSTER, replace(SPEC, sort_s=3e-4, sort_sequence_s=8e-6))
    for tp, waits in ((1, 0), (2, 2)):
        before, after = KERNELS.degree(tp), served.degree(tp)
        assert after.decoder.rest(1024) - before.decoder.rest(1024) == pytest.approx(waits * 50e-6, abs=1e-12)
        assert after.decoder.decode_attention == before.decoder.decode_attention
        assert after.head(64) - before.head(64) == pytest.approx(SPEC_SORTING, rel=1e-6)
    assert served.overhead(100) == pytest.approx(1e-3 + 100 * 2e-6)
    assert (served.in_flight, served.front_end_s) == (2, 7e-3)


SPEC_SORTING = 3e-4 + 64 * 8e-6
"""Llama 3's logits on an H100."""


def test_a_sampler_that_was_measured_is_not_added_again():
    measured = replace(KERNELS, provenance=FACTS | {"not_in_source": "links"})
    assert with_engine(measured, MODEL, CLUSTER, replace(SPEC, sort_s=1e-3)).degree(1).head == KERNELS.degree(1).head


def test_one_engine_replaces_another():
    ours, theirs = find_engine("exegpt"), find_engine("tensorrt-llm")
    directly = with_engine(KERNELS, MODEL, CLUSTER, ours)
    twice = with_engine(with_engine(KERNELS, MODEL, CLUSTER, theirs), MODEL, CLUSTER, ours)
    assert engine_of(twice) == engine_of(directly) == ours and twice.overhead == directly.overhead
    for tp in (1, 2):
        assert twice.degree(tp).decoder.rest.values == pytest.approx(directly.degree(tp).decoder.rest.values)
        assert twice.degree(tp).head.values == pytest.approx(directly.degree(tp).head.values)


def test_an_engine_that_is_not_known_is_not_taken_out():
    with pytest.raises(InputError, match="no engine 'mine'"):
        with_engine(replace(KERNELS, provenance=FACTS | {"serving": "mine"}), MODEL, CLUSTER, SPEC)
