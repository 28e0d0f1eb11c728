"""Imported experts: a hand-written systems folder, and the package's rows."""

import itertools
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from xcore.errors import InputError
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.experts import Experts
from xcore.specs.latent_attention import LatentAttention
from xcore.specs.model import ModelSpec
from xcore.specs.windows import Windows
from xprofiler.aiconfigurator import SYSTEMS, aiconfigurator_profile, systems_folder
from xprofiler.expert_tables import ExpertTables
from xprofiler.operator_tables import OperatorTables
from xprofiler.products import Products

FOLDER = systems_folder()
installed = pytest.mark.skipif(FOLDER is None, reason="the package aiconfigurator is not installed")

# 8 experts of width 64, 2 for each token, and a shared one of 128, in three of four layers; the first is dense.
MIXTURE = ModelSpec(
    "mixture", "mixtral", 4, 256, 8, 4, 32, 512, True, 1024, 4096, experts=Experts(8, 2, 64, 3, 128, skew=1.2)
)
ROWS = (1, 16, 64)
SIZES = (8, 64, 128, 256, 512, 1024)


def product(m, n, k, kind="bfloat16"):
    """Milliseconds of a product: bytes at a rate, after a start."""
    return 0.005 + n * k * (2e-8 if kind == "bfloat16" else 1e-8) + m * n * 1e-9


def wide(m, n, k):
    """The same of sizes that were not measured, by the package's interpolation."""
    at = np.array([(m, n, k) for m, n, k in itertools.product(ROWS, SIZES, SIZES)], dtype=float)
    device = parse_cluster("1xH100-SXM").device
    seconds = np.array([product(*shape) for shape in at]) * 1e-3
    products = Products.of(*at.T, seconds, device.flops_s["bf16"], device.bandwidth_bytes_s, 2)
    return 1e3 * products.seconds(n, k)[ROWS.index(m)]


def grouped(tokens, tp, ep):
    return 0.02 + 0.001 * tokens / (tp * ep)


def attention(batch, length):
    return 0.003 + 1e-6 * batch * length


def write(folder, name, rows):
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}_perf.parquet")


@pytest.fixture
def systems(tmp_path):
    """A systems folder with one system and one engine, whose newest experts are of another shape."""
    data = tmp_path / "data" / "h100_sxm"
    gemm = [
        {"gemm_dtype": kind, "m": m, "n": n, "k": k, "latency": product(m, n, k, kind)}
        for kind in ("bfloat16", "fp8_block", "fp8")
        for m, n, k in itertools.product(ROWS, SIZES, SIZES)
    ]
    write(data / "gemm" / "vllm" / "0.24.0", "gemm", gemm)
    shape = {"hidden_size": 256, "inter_size": 64, "topk": 2, "num_experts": 8}
    experts = [
        shape
        | {"moe_dtype": kind, "num_tokens": n, "moe_tp_size": tp, "moe_ep_size": ep, "kernel_source": kernel}
        | {"distribution": "power_law_1.2", "latency": grouped(n, tp, ep) * factor}
        for kind in ("bfloat16", "fp8_block")
        for n in (*ROWS, 128)
        for tp, ep in ((1, 1), (2, 1), (1, 2))
        for kernel, factor in (("grouped", 1.0), ("grouped_min_latency", 0.1), ("grouped_nongated", 0.2))
    ]
    write(data / "moe" / "vllm" / "0.22.0", "moe", experts)
    write(data / "moe" / "vllm" / "0.24.0", "moe", [row | {"hidden_size": 512} for row in experts])
    for phase in ("context", "generation"):
        rows = [
            {"head_dim": 32, "window_size": window, "kv_cache_dtype": "bfloat16", "attn_dtype": "bfloat16"}
            | {"num_heads": 8 // tp, "num_key_value_heads": 4 // tp, "batch_size": b, "isl": length, "step": 0}
            | {"kernel_source": "flash", "latency": attention(b, min(length, window or length))}
            for window, tp, b, length in itertools.product((0, 128), (1, 2), (1, 4), (64, 256, 1024))
        ]
        write(data / "attention" / "vllm" / "0.24.0", f"{phase}_attention", rows)
    for phase in ("context", "generation"):
        rows = [
            {"num_heads": heads, "kv_cache_dtype": "bfloat16", "batch_size": b, "isl": length, "step": 0}
            | {"latency": attention(b, length) * 2}
            for heads, b, length in itertools.product((4, 8), (1, 4), (16, 64, 256))
        ]
        write(data / "mla" / "vllm" / "0.24.0", f"{phase}_mla", rows)
    absorbed = [
        {"num_heads": heads, "bmm_dtype": "bfloat16", "op_name": name, "num_tokens": n, "latency": factor + 0.001 * n}
        for heads, (name, factor), n in itertools.product((4, 8), (("mla_gen_pre", 0.01), ("mla_gen_post", 0.02)), ROWS)
    ]
    write(data / "mla_bmm" / "vllm" / "0.24.0", "mla_bmm", absorbed)
    sizes = [{"num_gpus": 2, "message_size": size, "latency": 0.01 + size * 1e-7} for size in (256, 2**20)]
    write(data / "comm" / "vllm" / "0.24.0", "custom_allreduce", [row | {"kernel_source": "graph"} for row in sizes])
    nccl = [
        row | {"op_name": name, "nccl_dtype": "half", "kernel_source": "nccl", "latency": factor * row["latency"]}
        for row in sizes
        for name, factor in (("all_gather", 1.0), ("reduce_scatter", 2.0))
    ]
    write(data / "comm" / "nccl" / "2.29", "nccl", nccl)
    return tmp_path


def moved(size):
    """Milliseconds of a kernel that moves so many bytes: the least product, and the fastest read of weights."""
    fastest = max(n * k * 2 / product(m, n, k) for m in (1, 16) for n in SIZES for k in SIZES)
    return product(1, 8, 8) + size / fastest


def between(tokens, tp, values):
    """Norms, rotary embedding, and activations of so many values."""
    qkv = 512 // tp
    return sum(moved(2 * tokens * n) for n in (4 * 256, 4 * 256, 2 * qkv)) + values


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_layer_is_the_sum_of_its_operators(systems, tp, kind):
    """Attention; a quarter of a dense network; three quarters of router, shared and chosen experts; the all-reduces."""
    degree = aiconfigurator_profile(MIXTURE, "h100_sxm", dtype=kind, kv_dtype="bf16", folder=systems).degree(tp)
    dtype = "bfloat16" if kind == "bf16" else "fp8_block"
    whole = kind == "fp8" and tp == 2  # a part of 32 is no multiple of a block of 128
    for n in ROWS:
        heads = product(n, 512 // tp, 256, dtype) + product(n, 256, 256 // tp, dtype)
        dense = product(n, 1024 // tp, 256, dtype) + product(n, 256, 512 // tp, dtype) + moved(2 * n * 1536 // tp)
        shared = product(n, 256 // tp, 256, dtype) + product(n, 256, 128 // tp, dtype) + moved(2 * n * 384 // tp)
        experts = product(n, 8, 256) + shared + grouped(n, *((1, tp) if whole else (tp, 1)))
        reduced = 2 * (0.01 + n * 256 * 1e-7) if tp > 1 else 0.0
        layer = heads + 0.25 * dense + 0.75 * experts + between(n, tp, 0.0) + reduced
        assert degree.decoder.rest(n) == pytest.approx(layer * 1e-3)


def test_devices_that_share_experts_gather_their_tokens_and_scatter_the_sums(systems):
    apart = replace(MIXTURE, experts=replace(MIXTURE.experts, attention_dp=2))
    profile = aiconfigurator_profile(apart, "h100_sxm", folder=systems)
    alone = aiconfigurator_profile(MIXTURE, "h100_sxm", folder=systems)
    assert [degree.tp for degree in profile.degrees] == [1]
    for n in (1, 16, 64):
        more = profile.degree(1).decoder.rest(n) - alone.degree(1).decoder.rest(n)
        exchanged = 3 * (0.01 + 2 * n * 256 * 1e-7) + grouped(2 * n, 1, 2) - grouped(n, 1, 1)
        assert more == pytest.approx(0.75 * exchanged * 1e-3)
    with pytest.raises(InputError, match="exchange of tokens among 4 devices: pass --attention-dp with one of 2"):
        aiconfigurator_profile(
            replace(MIXTURE, experts=replace(MIXTURE.experts, attention_dp=4)), "h100_sxm", folder=systems
        )


def test_layers_with_a_window_count_by_their_share(systems):
    model = replace(MIXTURE, windows=Windows(128, 1))
    layer = aiconfigurator_profile(model, "h100_sxm", folder=systems).degree(1).decoder
    for table in (layer.encode_attention, layer.decode_attention):
        assert table(4, 1024) == pytest.approx((0.75 * attention(4, 1024) + 0.25 * attention(4, 128)) * 1e-3)
    with pytest.raises(InputError, match="chunks of 128 tokens"):
        aiconfigurator_profile(replace(model, windows=Windows(128, 1, "chunks")), "h100_sxm", folder=systems)


def test_latent_attention_expands_keys_with_prompts_and_absorbs_them_in_decoding(systems):
    """The product for keys and values is a part of prompts' attention, so a layer by tokens lacks it."""
    latent = LatentAttention(512, 128, 64, 128, 256)
    profile = aiconfigurator_profile(replace(MIXTURE, latent=latent), "h100_sxm", folder=systems)
    for tp in (1, 2):
        layer, heads = profile.degree(tp).decoder, 8 // tp
        expanded = heads * 256, 512
        assert layer.encode_attention(1, 64) == pytest.approx((2 * attention(1, 64) + wide(64, *expanded)) * 1e-3)
        assert layer.decode_attention(4, 64) == pytest.approx((2 * attention(4, 64) + 0.03 + 0.002 * 4) * 1e-3)
        assert layer.chunk_attention(16, 0) == pytest.approx((2 * attention(1, 16) + wide(16, *expanded)) * 1e-3)
    grouped_heads = aiconfigurator_profile(MIXTURE, "h100_sxm", folder=systems).degree(1).decoder
    products = wide(16, 832, 256) + wide(16, 8 * 192, 256) + wide(16, 256, 8 * 128)
    before = product(16, 512, 256) + product(16, 256, 256)
    rotary = moved(4 * 16 * 832) - moved(4 * 16 * 512)
    more = profile.degree(1).decoder.rest(16) - grouped_heads.rest(16)
    assert more == pytest.approx((products + rotary - before) * 1e-3)
    with pytest.raises(InputError, match=r"no latent attention with sizes 512, 64, 64, 128, only that of DeepSeek-V3"):
        other = replace(MIXTURE, latent=replace(latent, nope=64))
        aiconfigurator_profile(other, "h100_sxm", folder=systems)


def test_experts_that_were_not_measured_are_refused_with_the_way_out(systems):
    for changes in ({"count": 16}, {"ffn": 128}, {"skew": 1.01}):
        other = replace(MIXTURE, experts=replace(MIXTURE.experts, **changes))
        with pytest.raises(InputError, match=r"no experts like those of 'mixture' .* leave --profile out"):
            aiconfigurator_profile(other, "h100_sxm", folder=systems)
    with pytest.raises(InputError, match="no matrix products in mxfp4"):
        aiconfigurator_profile(MIXTURE, "h100_sxm", dtype="mxfp4", folder=systems)


def tables(system, engine, model, dtype):
    spec, cluster = builtin_model(model), parse_cluster(f"8x{SYSTEMS[system]}")
    return ExpertTables.of(spec, spec.experts, OperatorTables(FOLDER / "data" / system, engine), cluster, dtype)


@installed
def test_the_packages_rows_come_back():
    spec = builtin_model("qwen3-235b-a22b")
    experts = tables("h200_sxm", "sglang", spec.name, "fp8")
    shape = {"hidden_size": 4096, "inter_size": 1536, "topk": 8, "num_experts": 128, "moe_dtype": "fp8_block"}
    shape |= {"distribution": "power_law_1.2"}
    file = FOLDER / "data" / "h200_sxm" / "moe" / "sglang" / "0.5.14" / "moe_perf.parquet"
    measured = pq.read_table(file, filters=[(key, "==", value) for key, value in shape.items()]).to_pylist()
    assert len(measured) > 100
    for row in measured:
        split = row["moe_tp_size"], row["moe_ep_size"]
        (seconds,) = experts.seconds(split, np.array([float(row["num_tokens"])]))
        assert seconds == pytest.approx(row["latency"] * 1e-3)


@installed
@pytest.mark.parametrize("split", [(2, 1), (4, 1), (8, 1)])
def test_a_split_that_was_left_out_is_near_its_rows(split):
    """From one device's rows alone, the median error over the numbers of tokens is below 15 %."""
    experts = tables("b200_sxm", "sglang", "gpt-oss-120b", "mxfp4")
    one = replace(experts, measured={(1, 1): experts.measured[1, 1]})
    at = np.array([float(2**i) for i in range(13)])
    errors = one.seconds(split, at) / experts.seconds(split, at) - 1
    assert np.median(np.abs(errors)) < 0.15
