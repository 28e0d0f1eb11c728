"""Profiles from aiconfigurator's operator tables against the raw rows of its Parquet files."""

import functools

import numpy as np
import pyarrow.parquet as pq
import pytest

from xcore.document import from_dict, to_dict
from xcore.errors import InputError
from xcore.specs.builtin_models import builtin_model
from xcore.specs.engine_spec import EngineSpec
from xcore.specs.model import ModelSpec
from xcore.specs.profile import Profile
from xprofiler.aiconfigurator import SYSTEMS, aiconfigurator_profile, systems_folder
from xprofiler.products import Products

FOLDER = systems_folder()
installed = pytest.mark.skipif(FOLDER is None, reason="the package aiconfigurator is not installed")

# Sizes whose matrix products were all measured, at one and at two devices.
ON_GRID = ModelSpec("on-grid", "llama", 2, 4096, 32, 8, 128, 8192, True, 65536, 4096)


@functools.cache
def rows(path):
    return pq.read_table(FOLDER / "data" / "h100_sxm" / path).to_pylist()


def gemm():
    return [r for r in rows("gemm/vllm/0.24.0/gemm_perf.parquet") if r["gemm_dtype"] == "bfloat16"]


def product(m, n, k):
    (seconds,) = (r["latency"] * 1e-3 for r in gemm() if (r["m"], r["n"], r["k"]) == (m, n, k))
    return seconds


def moved(size):
    """A kernel that moves so many bytes: the least product, and the bandwidth of the fastest read of weights."""
    fastest = max(r["n"] * r["k"] * 2 / r["latency"] * 1e3 for r in gemm() if r["m"] <= 16)
    return min(r["latency"] for r in gemm()) * 1e-3 + size / fastest


def reduced(elements, devices):
    (seconds,) = (
        r["latency"] * 1e-3
        for r in rows("comm/vllm/0.24.0/custom_allreduce_perf.parquet")
        if (r["message_size"], r["num_gpus"], r["kernel_source"]) == (elements, devices, "vLLM_custom_graph")
    )
    return seconds


@functools.cache
def profile():
    return aiconfigurator_profile(ON_GRID, "h100_sxm")


@installed
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tokens", [16, 1024])
def test_a_layer_at_measured_shapes_is_the_sum_of_its_operators(tp, tokens):
    products = sum(product(tokens, n, k) for n, k in ON_GRID.layer_matrices(tp))
    qkv, width = (48 * 128 // tp, 3 * 8192 // tp)
    between = sum(moved(2 * tokens * n) for n in (4 * 4096, 4 * 4096, 2 * qkv, width))
    reduces = 2 * reduced(tokens * 4096, tp) if tp > 1 else 0.0
    assert profile().degree(tp).decoder.rest(tokens) == pytest.approx(products + between + reduces)
    if tp == 1:
        head = product(tokens, 65536, 4096) + moved(8 * tokens * 4096)
        assert profile().degree(1).head(tokens) == pytest.approx(head)


@installed
def test_a_serving_engine_waits_at_all_reduces_and_has_time_of_its_own_at_the_clock_that_was_measured():
    serving = EngineSpec("e", wait_s=50e-6, clock=0.5, iteration_s=1e-3, sequence_s=2e-6)
    served = aiconfigurator_profile(ON_GRID, "h100_sxm", serving=serving)
    for tp, reduces in ((1, 0), (2, 2)):
        more = served.degree(tp).decoder.rest(1024) - profile().degree(tp).decoder.rest(1024)
        assert more == pytest.approx(reduces * 50e-6, abs=1e-12)
    assert served.overhead(100) == pytest.approx(1e-3 + 100 * 2e-6)
    assert served.provenance["serving"] == "e"


@installed
@pytest.mark.parametrize("system", SYSTEMS)
def test_links_come_near_their_data_sheets_and_not_above(system):
    """Messages are counted in elements of two bytes; taken for bytes, every link would be at half its rate or less."""
    profile = aiconfigurator_profile(ON_GRID, system)
    data_sheet = {"a100_sxm": 300e9, "h100_sxm": 450e9, "h200_sxm": 450e9, "b200_sxm": 900e9, "b300_sxm": 900e9}.get(
        system, 64e9
    )
    size = 2.0**28
    assert 0.3 < size / profile.send(size) / data_sheet < 1.0


@installed
@pytest.mark.parametrize("phase", ["context", "generation"])
def test_every_attention_row_comes_back_and_the_rest_is_filled(phase):
    heads = {"head_dim": 128, "window_size": 0, "kv_cache_dtype": "bfloat16", "kernel_source": "vllm_flash_attn_fa3"}
    heads |= {"num_heads": 32, "num_key_value_heads": 8}
    measured = {
        (r["batch_size"], r["isl"] + r["step"]): r["latency"] * 1e-3
        for r in rows(f"attention/vllm/0.24.0/{phase}_attention_perf.parquet")
        if all(r[key] == value for key, value in heads.items())
    }
    layer = profile().degree(1).decoder
    table = layer.encode_attention if phase == "context" else layer.decode_attention
    assert len(measured) > 100
    for (batch, length), seconds in measured.items():
        assert table(batch, length) == pytest.approx(seconds)
        assert table.covers(batch, length)
    assert len(table.values) - len(table.filled) == len(measured)
    batch, length = table.points[0][-1], table.points[1][-1]
    assert not table.covers(batch, length)
    assert table(batch, length) > table(batch / 2, length)


@installed
def test_a_prompt_in_pieces_computes_what_the_whole_one_does():
    layer = profile().degree(1).decoder
    chunks = sum(layer.chunk_attention(1024, past) for past in (0, 1024, 2048, 3072))
    # Each chunk is taken at the speed of the whole prompt so far, which grows with its length.
    assert layer.encode_attention(1, 4096) < chunks < 1.5 * layer.encode_attention(1, 4096)
    assert layer.chunk_attention(1024, 0) == pytest.approx(layer.encode_attention(1, 1024))
    assert layer.chunk_attention(1, 8192) >= layer.decode_attention(1, 8193)


@installed
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("engine", ["vllm", "trtllm", "sglang"])
def test_every_system_and_engine_composes_a_common_model(system, engine):
    profile = aiconfigurator_profile(builtin_model("llama-3.1-70b"), system, engine)
    assert [d.tp for d in profile.degrees] == [1, 2, 4, 8]
    step = [d.decoder.rest(16) for d in profile.degrees]
    assert step[0] > step[1]
    assert profile.device == SYSTEMS[system]


@installed
@pytest.mark.parametrize("axis", ["n", "k"])
def test_a_width_that_was_left_out_is_predicted_within_7_percent(axis):
    """Products 8192 wide, or deep, from the other measured ones: the median over their shapes and numbers of rows."""
    columns = {c: np.array([float(r[c]) for r in gemm()]) for c in ("m", "n", "k", "latency")}
    kept = columns[axis] != 8192
    products = Products.of(*(columns[c][kept] for c in "mnk"), columns["latency"][kept] * 1e-3, 989.5e12, 3.35e12, 2)
    errors = []
    for other in (1024, 4096, 10240, 16384):
        n, k = (8192, other) if axis == "n" else (other, 8192)
        left = (columns["n"] == n) & (columns["k"] == k)
        order = np.argsort(columns["m"][left])
        errors.append(products.seconds(n, k) / (columns["latency"][left][order] * 1e-3) - 1)
    assert np.median(np.abs(errors)) < 0.07


@installed
def test_eight_bits_are_faster_but_for_the_head():
    llama = builtin_model("llama-3.1-70b")
    dtypes = (("bf16", None), ("fp8", "fp8"), ("fp8", None))
    half, eight, mixed = (aiconfigurator_profile(llama, "h200_sxm", "vllm", *of).degree(2) for of in dtypes)
    assert mixed.decoder.decode_attention == half.decoder.decode_attention  # 16 bits unless 8 are asked for
    assert eight.decoder.rest(8192) < 0.7 * half.decoder.rest(8192)
    assert eight.decoder.decode_attention(64, 4096) < half.decoder.decode_attention(64, 4096)
    assert eight.head(64) == pytest.approx(half.head(64))


@installed
def test_heads_that_were_not_measured_follow_from_those_that_were():
    """Llama-2-7B's 32 KV heads were not decoded with, eight were: a sequence counts for four."""
    profile = aiconfigurator_profile(builtin_model("llama-2-7b"), "a100_sxm", dtype="fp16")
    single, four = profile.degree(1).decoder.decode_attention, profile.degree(4).decoder.decode_attention
    batch = np.array([1.0, 16.0, 64.0])
    np.testing.assert_allclose(single(batch, 1024.0), four(4 * batch, 1024.0))


@installed
def test_missing_tables_are_named_and_the_profile_round_trips_through_json():
    for word in ("sampling", "time per iteration", "norms"):
        assert word in profile().provenance["not_in_source"]
    assert profile().provenance["gemm_version"] == "0.24.0"
    assert from_dict(Profile, to_dict(profile()), "the profile") == profile()


@installed
@pytest.mark.parametrize(
    ("model", "system", "engine", "dtype", "message"),
    [
        ("llama-3.1-8b", "h100", "vllm", "bf16", "no system 'h100': the systems are a100_sxm, h100_sxm"),
        ("llama-3.1-8b", "h100_sxm", "orca", "bf16", "no tables of engine 'orca'"),
        (
            "llama-3.1-8b",
            "h100_sxm",
            "vllm",
            "fp32",
            "no matrix products in fp32: use one of bf16, fp16, fp8, int8, w8a16, int4, nvfp4",
        ),
        ("llama-3.1-8b", "a100_sxm", "vllm", "fp8", "'a100_sxm' has no gemm_dtype fp8"),
        ("opt-1.3b", "a100_sxm", "vllm", "fp16", "no head_dim 64 .* use one of 128"),
        ("t5-11b", "a100_sxm", "vllm", "fp16", "'t5-11b' has an encoder"),
    ],
)
def test_bad_inputs_are_refused_with_what_there_is(model, system, engine, dtype, message):
    with pytest.raises(InputError, match=message):
        aiconfigurator_profile(builtin_model(model), system, engine, dtype)


def test_a_folder_without_tables_is_refused(tmp_path):
    with pytest.raises(InputError, match="not a systems folder of aiconfigurator"):
        aiconfigurator_profile(ON_GRID, "h100_sxm", folder=tmp_path)
