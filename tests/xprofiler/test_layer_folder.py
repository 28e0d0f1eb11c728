"""A folder of one engine's layers against its raw rows."""

import csv
import shutil
from dataclasses import replace

import pytest

from tests.public_data import needs_data
from xcore.document import from_dict, to_dict
from xcore.errors import InputError
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.engine_spec import NO_ENGINE
from xcore.specs.experts import Experts
from xcore.specs.model import ModelSpec
from xcore.specs.profile import Profile
from xprofiler.layer_folder import layers_profile
from xprofiler.roofline_device import roofline_device
from xsimulator.cost.stage import iteration_attention

LLAMA = builtin_model("llama-3.1-8b")


@pytest.fixture(scope="module")
def folder():
    return needs_data("vllm_runs", "rtxpro6000_llama-3.1-8b", "profile_tp1")


@pytest.fixture(scope="module")
def profile(folder):
    return layers_profile(LLAMA, folder)


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_every_attention_row_comes_back(folder, profile):
    layer = profile.degree(1).decoder
    for row in rows(folder / "attention.csv"):
        chunk, past, decodes, context, us = (float(v) for v in row.values())
        tokens, cached = ((chunk,), (past,)) if chunk else ((), ())
        assert iteration_attention(layer, tokens, cached, decodes, context) == pytest.approx(us * 1e-6)
        if not chunk:
            assert layer.decode_attention(decodes, context) == pytest.approx(us * 1e-6)
        elif not decodes:
            assert layer.chunk_attention(chunk, past) == pytest.approx(us * 1e-6)


def test_a_layer_is_the_sum_of_its_measured_parts(folder, profile):
    dense = {(r["layer"], int(r["tokens"])): float(r["time_us"]) * 1e-6 for r in rows(folder / "dense.csv")}
    ends = {(r["layer"], int(r["sequences"])): float(r["time_us"]) * 1e-6 for r in rows(folder / "per_sequence.csv")}
    tables = profile.degree(1)
    once = ("qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")
    for n in (1, 16, 512, 2048):
        assert tables.decoder.rest(n) == pytest.approx(2 * dense["layernorm", n] + sum(dense[p, n] for p in once))
        assert tables.embedding(n) == pytest.approx(dense["embedding", n])
    for n in (1, 64, 256):
        assert tables.head(n) == pytest.approx(ends["lm_head", n] + ends["sampler", n] + dense["final_layernorm", n])


def test_only_prompts_beside_more_sequences_than_the_engine_takes_are_filled(profile):
    mixed = profile.degree(1).decoder.mixed_attention
    assert mixed.covers(700, 100, 100, 900) and mixed.covers(0, 0, 200, 900)
    assert not mixed.covers(700, 100, 200, 900)
    assert mixed.at(512, 0, 256, 1024) > mixed.at(512, 0, 128, 1024)


def test_points_between_the_two_measured_grids_lie_near_their_neighbours(profile):
    """(923, 64, 64, 1024) was not measured: its neighbours in both grids were."""
    at = profile.degree(1).decoder.mixed_attention.at
    assert at(512, 64, 64, 1024) < at(923, 64, 64, 1024) < at(1024, 64, 64, 1024)


def test_meta_names_dtype_and_device_and_the_profile_survives_json(profile):
    assert (profile.dtype, profile.device, profile.source) == ("bf16", "RTXPRO6000", "operators")
    assert "time per iteration" in profile.provenance["not_in_source"]
    assert from_dict(Profile, to_dict(profile), "the profile") == profile


def test_another_model_is_refused(folder):
    with pytest.raises(InputError, match=r"has layers of meta-llama/Llama-3\.1-8B, not of 'opt-13b'"):
        layers_profile(builtin_model("opt-13b"), folder)


def test_without_meta_the_dtype_is_required(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "layers")
    with pytest.raises(InputError, match="pass --dtype"):
        layers_profile(LLAMA, tmp_path / "layers")
    assert layers_profile(LLAMA, tmp_path / "layers", "fp8").dtype == "fp8"


def test_missing_files_columns_and_layers_are_named(tmp_path):
    with pytest.raises(InputError, match=r"no file '.*dense\.csv'"):
        layers_profile(LLAMA, tmp_path, "bf16")
    (tmp_path / "dense.csv").write_text("layer,time_us\nqkv_proj,1\n")
    with pytest.raises(InputError, match="no column 'tokens'"):
        layers_profile(LLAMA, tmp_path, "bf16")
    (tmp_path / "dense.csv").write_text("layer,tokens,time_us\nqkv_proj,1,1\n")
    with pytest.raises(InputError, match=r"no layer 'layernorm': its layers are qkv_proj"):
        layers_profile(LLAMA, tmp_path, "bf16")


MIXTURE = ModelSpec("mixture", "mixtral", 4, 256, 8, 4, 32, 512, True, 1024, 4096, experts=Experts(8, 2, 128, 3))
LAYERS = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")


def written(folder, moe):
    """One degree: layers of 10, 20, … µs whose times grow with the tokens, the ends, and attention of 2 µs a token."""
    folder.mkdir(parents=True)
    ends = ("embedding", "final_layernorm")
    dense = [f"{name},{n},{10 * (i + 1) + n}" for i, name in enumerate((*LAYERS, *ends)) for n in (1, 64, 4096)]
    rows = [f"{name},{n},{100 + n}" for name in ("lm_head", "sampler") for n in (1, 64)]
    chunks = [f"{c},{p},0,0,{2 * c + p}" for c in (16, 64) for p in (0, 64)]
    chunks += [f"0,0,{n},{c},{n + c}" for n in (1, 8) for c in (16, 64)]
    chunks += [
        f"{c},{p},{n},{k},{2 * c + p + n + k}" for c in (16, 64) for p in (0, 64) for n in (1, 8) for k in (16, 64)
    ]
    for name, head, lines in (
        ("dense", "layer,tokens,time_us", dense),
        ("per_sequence", "layer,sequences,time_us", rows),
        ("attention", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", chunks),
        ("moe", "tokens,experts,top_k,ep,time_us", moe),
    ):
        (folder / f"{name}.csv").write_text("\n".join((head, *lines)) + "\n")


def test_a_mixture_reads_its_experts_and_each_degree_has_its_folder(tmp_path):
    """The sum is that of the layers: three of four have experts, whose times double from 4 to 8 tokens and beyond."""
    experts = [f"{n},8,2,{ep},{n * 100 / ep}" for n in (1, 4, 8) for ep in (1, 2)]
    written(tmp_path / "profile_tp1", experts)
    written(tmp_path / "tp2", [*experts, "4,16,2,1,7"])
    (tmp_path / "meta.yaml").write_text("variant: bf16\nhardware: H100-SXM\n")
    profile = layers_profile(MIXTURE, tmp_path)
    assert [degree.tp for degree in profile.degrees] == [1, 2]
    around, feed_forward = (10 + 20 + 30 + 40 + 10, 5), (50 + 60 + 70, 3)
    cluster = parse_cluster("2xH100-SXM")
    device = roofline_device(cluster.device, cluster.intra, "bf16", "bf16", NO_ENGINE)
    for tp in (1, 2):  # with tensor parallelism each device has a part of every expert, so ep is 1
        for n in (1, 64, 4096):
            layer = around[0] + around[1] * n + 0.25 * (feed_forward[0] + feed_forward[1] * n) + 0.75 * 100 * n
            reduced = 2 * device.all_reduce(n * 256, tp)
            assert profile.degree(tp).decoder.rest(n) == pytest.approx(layer * 1e-6 + reduced)
        assert profile.degree(tp).embedding(64) == pytest.approx(144e-6 + device.all_reduce(64 * 256, tp))
    whole = replace(MIXTURE, experts=replace(MIXTURE.experts, expert_parallel=True))
    saved = layers_profile(MIXTURE, tmp_path).degree(2).decoder.rest(8) - (
        layers_profile(whole, tmp_path).degree(2).decoder.rest(8)
    )
    assert saved == pytest.approx(0.75 * 100 * 8 / 2 * 1e-6)


def test_experts_that_were_not_timed_are_refused(tmp_path):
    written(tmp_path / "tp1", ["4,16,2,1,7"])
    with pytest.raises(
        InputError, match=r"no rows with experts 8, top_k 2, ep 1, which 'mixture' needs: it has experts 16"
    ):
        layers_profile(MIXTURE, tmp_path, "bf16")
    with pytest.raises(InputError, match=r"window of 128 tokens .* leave --profile out"):
        layers_profile(builtin_model("gpt-oss-20b"), tmp_path, "mxfp4")
