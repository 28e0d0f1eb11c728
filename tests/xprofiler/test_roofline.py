"""The roofline: its tables are the arithmetic of rates and kernels, and unknown rates are refused."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcore.document import from_dict, to_dict
from xcore.errors import InputError
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import ClusterSpec, parse_cluster
from xcore.specs.device_spec import DeviceSpec, LinkSpec
from xcore.specs.engine_spec import NO_ENGINE, EngineSpec, LinkWait, find_engine
from xcore.specs.model import ModelSpec
from xcore.specs.profile import Profile
from xprofiler.rings import ring_all_gather_s, ring_all_reduce_s
from xprofiler.roofline import roofline_profile

OPT_13B = ModelSpec("opt-13b", "opt", 40, 5120, 40, 40, 128, 20480, False, 50272, 2048, tied_embeddings=True)
LLAMA_8B, H100 = builtin_model("llama-3.1-8b"), parse_cluster("8xH100-SXM")
VLLM = {dtype: roofline_profile(LLAMA_8B, H100, dtype, engine=find_engine("vllm")) for dtype in ("fp16", "fp8")}


@pytest.fixture(scope="module")
def profile():
    return roofline_profile(OPT_13B, parse_cluster("4xA40"), "fp16")


FLOPS, BANDWIDTH, WIRE = 149.7e12 * 0.67, 0.696e12 * 0.86, 19e9
"""What products, kernels between them, and links of an A40 reach."""


def product(n, k, rows, value_bytes=2, flops_s=FLOPS, bandwidth=BANDWIDTH):
    moved = value_bytes * k * (n + rows) + 2 * n * rows
    return 4.5e-6 + math.sqrt((2 * n * k * rows / flops_s) ** 2 + (moved / bandwidth) ** 2)


def layer_rest(model, tokens, tp, reduce_s):
    """By hand: products, two norms with residual and one activation, all-reduces."""
    products = sum(product(n, k, tokens) for n, k in model.layer_matrices(tp))
    moved = tokens * (16 * model.hidden + 2 * (3 if model.gated else 2) * model.ffn / tp)
    return products + moved / BANDWIDTH + 3 * 2e-6 + 2 * reduce_s


@pytest.mark.parametrize("tokens", [1, 64, 384, 16384])
def test_a_layer_is_its_products_and_the_kernels_between_them(profile, tokens):
    assert profile.degree(1).decoder.rest(tokens) == pytest.approx(layer_rest(OPT_13B, tokens, 1, 0.0), rel=1e-9)


@pytest.mark.parametrize("tokens", [1, 64, 384, 16384])
def test_tensor_parallelism_divides_products_but_not_norms_and_adds_all_reduces(profile, tokens):
    reduce = ring_all_reduce_s(tokens * 5120 * 2, 4, WIRE)
    assert profile.degree(4).decoder.rest(tokens) == pytest.approx(layer_rest(OPT_13B, tokens, 4, reduce), rel=1e-9)


def test_large_encoding_batches_are_bound_by_flops_and_small_decoding_batches_by_bytes(profile):
    layer = profile.degree(1).decoder
    products = sum(n * k for n, k in OPT_13B.layer_matrices())
    assert layer.rest(16384) == pytest.approx(2 * 16384 * products / FLOPS, rel=0.06)
    assert layer.rest(1) == pytest.approx(2 * products / BANDWIDTH, rel=0.03)


def test_what_goes_over_links_has_16_bits_whatever_the_weights_have():
    half, eight = (roofline_profile(LLAMA_8B, H100, dtype) for dtype in ("bf16", "fp8"))
    tokens = 8192
    wire = 2 * (2 * 7 / 8 * tokens * 4096 * 2 / H100.intra.bandwidth_bytes_s + H100.intra.latency_s)
    for rounded in (half, eight):
        waited = roofline_profile(LLAMA_8B, replace(H100, intra=LinkSpec(1e24, 0.0)), rounded.dtype)
        waits = rounded.degree(8).decoder.rest(tokens) - waited.degree(8).decoder.rest(tokens)
        assert waits == pytest.approx(wire, rel=1e-6)


def test_8_bit_weights_leave_embedding_and_head_in_16_bits_and_all_logits_on_every_rank():
    half, eight = (roofline_profile(LLAMA_8B, H100, dtype) for dtype in ("bf16", "fp8"))
    for tp in (1, 8):
        assert eight.degree(tp).head == half.degree(tp).head
        assert eight.degree(tp).embedding == half.degree(tp).embedding
    rows, bandwidth = 512, 3.35e12 * 0.84
    logits = product(128256 / 8, 4096, rows, flops_s=989.5e12 * 0.78, bandwidth=bandwidth)
    norm, sampling = 2e-6 + 8 * rows * 4096 / bandwidth, 18 * rows * 128256 / bandwidth
    gather = 7 / 8 * rows * 128256 * 2 / H100.intra.bandwidth_bytes_s + H100.intra.latency_s
    assert eight.degree(8).head(rows) == pytest.approx(norm + logits + gather + sampling, rel=1e-9)


def test_8_bit_products_reach_the_share_of_static_scales():
    layer = roofline_profile(LLAMA_8B, H100, "fp8").degree(1).decoder
    products = sum(product(n, k, 16384, 1, 1979e12 * 0.75, 3.35e12 * 0.84) for n, k in LLAMA_8B.layer_matrices())
    between = 16384 * (16 * 4096 + 6 * 14336) / (3.35e12 * 0.84) + 3 * 2e-6
    assert layer.rest(16384) == pytest.approx(products + between, rel=1e-9)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "share", "kv_bytes", "head_s"),
    [
        ("bf16", None, 0.54, 2, 31e-9),
        ("fp8", None, 0.54, 2, 31e-9),  # keys and values keep 16 bits unless they are asked for in 8
        ("fp8", "fp8", 0.75, 1, 7e-9),
        ("bf16", "fp8", 0.54, 1, 7e-9),
    ],
)
def test_attention_by_the_dtype_of_keys_and_values(dtype, kv_dtype, share, kv_bytes, head_s):
    layer = roofline_profile(LLAMA_8B, H100, dtype, kv_dtype=kv_dtype).degree(1).decoder
    n, batch, heads, kv_heads, size = 4096, 4, 32, 8, 128
    passes = 5 * batch * n * (heads + 2 * kv_heads) * size * 2 / (3.35e12 * 0.84)
    flops = 4 * batch * n * (n + 1) / 2 * heads * size / (989.5e12 * share)
    assert layer.encode_attention(batch, n) == pytest.approx(5e-6 + passes + flops, rel=1e-9)
    read = 256 * (1024 - 1) * 2 * kv_heads * size * kv_bytes / (3.35e12 * 0.88)
    assert layer.decode_attention(256, 1024) == pytest.approx(7e-6 + 256 * kv_heads * head_s + read, rel=1e-9)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_collectives_over_pcie_are_rings_at_the_bandwidth_that_so_many_devices_share(tp):
    """More devices share it: four take longer for the same data than with the bandwidth of a pair."""
    ring = ((2, 20e9), (4, 5e9))
    cluster = replace(H100, intra=LinkSpec(20e9, 15e-6, ring))
    shared, bare = (roofline_profile(LLAMA_8B, c) for c in (cluster, replace(H100, intra=LinkSpec(1e24, 0.0))))
    for tokens in (1, 64, 8192):
        more = shared.degree(tp).decoder.rest(tokens) - bare.degree(tp).decoder.rest(tokens)
        rate = 20e9 if tp == 2 else 5e9  # beyond the last number as there
        assert more == pytest.approx(2 * ring_all_reduce_s(tokens * 4096 * 2, tp, rate), rel=1e-6)
        more = shared.degree(tp).head(tokens) - bare.degree(tp).head(tokens)
        assert more == pytest.approx(ring_all_gather_s(tokens * 128256 * 2, tp, rate), rel=1e-6)


def test_an_engine_waits_at_every_all_reduce_and_has_time_of_its_own_and_a_lower_clock():
    slow = EngineSpec("slow", wait_s=50e-6, clock=0.5, iteration_s=1e-3, sequence_s=5e-6)
    waits, bare = (roofline_profile(LLAMA_8B, H100, engine=e) for e in (replace(slow, clock=1.0), NO_ENGINE))
    for tp, reduces in ((1, 0), (2, 2), (8, 2)):
        more = waits.degree(tp).decoder.rest(256) - bare.degree(tp).decoder.rest(256)
        assert more == pytest.approx(reduces * 50e-6, abs=1e-12)
        assert waits.degree(tp).decoder.decode_attention == bare.degree(tp).decoder.decode_attention
    assert waits.overhead(0) == 1e-3 and waits.overhead(100) == pytest.approx(1e-3 + 100 * 5e-6)
    assert waits.overhead(10000) == pytest.approx(1e-3 + 10000 * 5e-6)  # beyond its grid
    clocked = roofline_profile(LLAMA_8B, H100, engine=slow).degree(1).decoder
    layer = bare.degree(1).decoder
    assert clocked.rest(131072) / layer.rest(131072) == pytest.approx(2.0, rel=0.1)  # computing takes twice as long
    assert clocked.rest(1) == pytest.approx(layer.rest(1), rel=1e-3)  # reading does not
    assert clocked.decode_attention(256, 1000) == layer.decode_attention(256, 1000)


def test_ranks_wait_by_link_and_degree():
    engine = EngineSpec("e", wait_s=30e-6, waits=(LinkWait(250e9, ((2, 4e-6), (8, 12e-6))),))
    slow = replace(H100, intra=LinkSpec(20e9))
    for cluster, waits in ((H100, {1: 0.0, 2: 4e-6, 4: 8e-6, 8: 12e-6}), (slow, {1: 0.0, 2: 30e-6, 8: 30e-6})):
        waiting, bare = (roofline_profile(LLAMA_8B, cluster, engine=e) for e in (engine, NO_ENGINE))
        for tp, wait in waits.items():
            more = waiting.degree(tp).decoder.rest(256) - bare.degree(tp).decoder.rest(256)
            assert more == pytest.approx(2 * wait, abs=1e-12)


@pytest.mark.parametrize(("sorts", "rows"), [(True, 1), (True, 64), (False, 64), (None, 64)])
def test_sampling_from_sorted_logits_takes_longer_on_every_rank(sorts, rows):
    engine, model = EngineSpec("e", sort_s=3e-4, sort_sequence_s=9e-6), replace(LLAMA_8B, sorts_logits=sorts)
    sorting, bare = (roofline_profile(model, H100, engine=e) for e in (engine, NO_ENGINE))
    for tp in (1, 8):
        more = sorting.degree(tp).head(rows) - bare.degree(tp).head(rows)
        assert more == pytest.approx((3e-4 + 9e-6 * rows) if sorts else 0.0, abs=1e-12)
    assert ("generation_config" in sorting.provenance["sampling"]) == (sorts is not False)
    assert "sampling" not in bare.provenance


def test_an_engines_kernel_for_keys_and_values_in_8_bits_reads_at_its_own_rate():
    engine = EngineSpec("e", kv8_rate=0.7)
    for kv_dtype, rate in (("bf16", 1.0), ("fp8", 0.7)):
        profiles = [roofline_profile(LLAMA_8B, H100, kv_dtype=kv_dtype, engine=e) for e in (engine, NO_ENGINE)]
        own, bare = (p.degree(1).decoder.decode_attention(256, 4096) for p in profiles)
        started = 7e-6 + 256 * 8 * {"bf16": 31e-9, "fp8": 7e-9}[kv_dtype]
        assert own - started == pytest.approx((bare - started) / rate)


def test_products_in_nvfp4_take_longer_where_the_device_computes_in_it():
    engine, rows = EngineSpec("e", nvfp4_product_s=5e-6), 64.0
    for kind, dtype, longer_s in (("B200", "nvfp4", 5e-6), ("B200", "fp8", 0.0), ("H100-SXM", "nvfp4", 0.0)):
        cluster = parse_cluster(f"1x{kind}")
        profiles = [roofline_profile(LLAMA_8B, cluster, dtype, engine=e) for e in (engine, NO_ENGINE)]
        own, bare = (p.degree(1).decoder.rest(rows) for p in profiles)
        assert own - bare == pytest.approx(len(LLAMA_8B.token_matrices(1)) * longer_s, abs=1e-12)
        heads = [p.degree(1).head(rows) for p in profiles]
        assert heads[0] == heads[1], "the output head has 16 bits"


def test_a_profile_has_its_engines_pace():
    engine = EngineSpec("e", in_flight=2, front_end_s=13e-3)
    profile = roofline_profile(LLAMA_8B, H100, engine=engine)
    assert (profile.in_flight, profile.front_end_s) == (2, 13e-3)


def test_the_cpu_has_no_launches_and_reads_at_its_own_rate():
    cpu = DeviceSpec("cpu", 1e11, 30e9, {"fp32": 200e9}, 1.0, 1.0, attention_fraction=1.0)
    profile = roofline_profile(LLAMA_8B, ClusterSpec("c", 1, 1, cpu, LinkSpec(1e9), LinkSpec(1e9)), "fp32")
    weights = sum(n * k for n, k in LLAMA_8B.layer_matrices())
    assert profile.degree(1).decoder.rest(1) == pytest.approx(weights * 4 / 30e9, rel=0.05)
    assert profile.degree(1).decoder.decode_attention(1, 1) < 1e-7


SIZES = st.floats(1, 60000)


@given(SIZES, SIZES, st.sampled_from(["fp16", "fp8"]), st.sampled_from([1, 2, 8]))
def test_more_work_takes_longer_and_never_longer_for_each(a, b, dtype, tp):
    """What the search's ceilings rest on: times rise with the batch, and per sequence they fall."""
    few, many = sorted((a, b))
    degree = VLLM[dtype].degree(tp)
    for table in (degree.decoder.rest, degree.head, degree.embedding, VLLM[dtype].overhead):
        assert table(few) <= table(many) * (1 + 1e-12)
        assert table(many) / many <= table(few) / few * (1 + 1e-9)
    attention = degree.decoder.decode_attention
    assert attention(few, 1000) <= attention(many, 1000) * (1 + 1e-12)
    assert attention(many, 1000) / many <= attention(few, 1000) / few * (1 + 1e-9)
    assert attention(64, few) <= attention(64, many) * (1 + 1e-12)


def test_a_prompt_in_chunks_attends_to_as_much_as_a_whole_one(profile):
    layer = profile.degree(1).decoder
    unsplit = layer.encode_attention(1, 2048)
    halves = layer.chunk_attention(1024, 0) + layer.chunk_attention(1024, 1024)
    assert halves == pytest.approx(unsplit, rel=0.05)


def test_the_papers_encoding_and_decoding_times_come_out(profile):
    """Paper, Table 7: OPT-13B on 4 A40, task S: 1.68 s to encode (about 50 prompts), 0.038 s per decoding iteration: a
    fifth less than here at the batch that B_E = 49 and N_D = 7 give (of the two schedules one is quicker, one slower).
    """
    tables = profile.degree(4)
    encode = 40 * (tables.decoder.rest(50 * 256.5) + tables.decoder.encode_attention(50, 256.5))
    decode = 40 * (tables.decoder.rest(160) + tables.decoder.decode_attention(160, 276)) + tables.head(160)
    assert encode == pytest.approx(1.68, rel=0.1)
    assert decode == pytest.approx(0.038, rel=0.25)


def test_a_profile_survives_the_way_through_json(profile):
    again = from_dict(Profile, to_dict(profile), "the profile")
    assert again == profile
    assert again.fingerprint == profile.fingerprint


def test_a_dtype_that_the_device_lacks_is_refused_with_those_it_has():
    cluster = parse_cluster("4xA40")
    half = replace(cluster.device, flops_s={"fp16": 1e14, "int8": 2e14, "fp4": 4e14})
    with pytest.raises(InputError, match=r"'A40' has no rate for fp32: pass one of fp16, int8 as --dtype"):
        roofline_profile(OPT_13B, replace(cluster, device=half), "fp32")


def test_an_unprofiled_degree_is_refused(profile):
    with pytest.raises(InputError, match="no tensor-parallel degree 8: it has 1, 2, 4"):
        profile.degree(8)


def test_a_window_bounds_what_attention_costs(profile):
    windowed = replace(OPT_13B, window=256)
    layer, full = (made.degree(1).decoder for made in (roofline_profile(windowed, parse_cluster("4xA40")), profile))
    assert layer.decode_attention(8, 256) == full.decode_attention(8, 256)
    assert layer.decode_attention(8, 2048) == layer.decode_attention(8, 512) == layer.decode_attention(8, 256)
    assert layer.encode_attention(1, 256) == full.encode_attention(1, 256)
    assert layer.encode_attention(64, 2048) < full.encode_attention(64, 2048)
    later = layer.chunk_attention(1024, 4096)
    assert later == layer.chunk_attention(1024, 8192) > layer.chunk_attention(1024, 0)
