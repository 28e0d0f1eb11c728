"""A folder of one engine's layers against its raw rows."""

import csv
import shutil

import pytest

from tests.public_data import needs_data
from xcore.document import from_dict, to_dict
from xcore.errors import InputError
from xcore.specs.builtin_models import builtin_model
from xcore.specs.profile import Profile
from xprofiler.layer_folder import layers_profile
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
