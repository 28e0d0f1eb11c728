"""Vidur's CSV files against their raw rows. The public ones are of two models, so the tests relabel one of them."""

import csv
from statistics import median

import pytest

from tests.public_data import needs_data
from xcore.errors import InputError
from xcore.specs.builtin_models import builtin_model
from xprofiler.vidur import vidur_profile

LLAMA = builtin_model("llama-2-70b")
SHAPE = {"n_head": 64, "n_kv_head": 8, "n_embd": 8192, "n_expanded_embd": 28672}


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The public files, the other model's operators under the name of Llama-2-70B."""
    data = tmp_path_factory.mktemp("vidur")
    mlp = [row | SHAPE for row in rows(needs_data("gpu", "a100_llama2-7b_mlp.csv"))]
    with (data / "mlp.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, mlp[0])
        writer.writeheader()
        writer.writerows(mlp)
    (data / "attention.csv").symlink_to(needs_data("gpu", "a100_70b_tp2_attention.csv"))
    for name in ("a100_dgx_all_reduce", "a100_dgx_send_recv"):
        (data / f"{name}.csv").symlink_to(needs_data("gpu", "network", f"{name}.csv"))
    return data


@pytest.fixture(scope="module")
def profile(folder):
    return vidur_profile(LLAMA, folder)


def seconds(measured, *operators):
    """The median over rows of the operators' sum."""
    return median(sum(float(row[f"time_stats.{op}.median"] or 0) for op in operators) for row in measured) * 1e-3


def test_a_layer_is_the_sum_of_its_operators_and_two_all_reduces(folder, profile):
    kept = [r for r in rows(folder / "mlp.csv") if (r["num_tokens"], r["num_tensor_parallel_workers"]) == ("64", "2")]
    once = "input_layernorm attn_pre_proj attn_rope attn_post_proj post_attention_layernorm mlp_up_proj mlp_act"
    layer = seconds(kept, *once.split(), "mlp_down_proj", "add", "add")
    sizes = [
        r for r in rows(folder / "a100_dgx_all_reduce.csv") if (r["num_workers"], r["devices_per_node"]) == ("2", "2")
    ]
    at = sorted({int(r["size"]) for r in sizes}, key=lambda size: abs(size - 64 * 8192 * 2))[0]
    reduce = seconds([r for r in sizes if int(r["size"]) == at], "all_reduce")
    assert [d.tp for d in profile.degrees] == [2]  # attention was measured at two devices alone
    assert profile.degree(2).decoder.rest(64) == pytest.approx(layer + 2 * reduce, rel=0.05)
    assert profile.degree(2).decoder.rest(64) > layer


def test_attention_rows_come_back(folder, profile):
    layer = profile.degree(2).decoder
    for row in rows(folder / "attention.csv")[::97]:
        prefill, new, cached = row["is_prefill"] == "True", int(row["prefill_chunk_size"]), int(row["kv_cache_size"])
        operator = "attn_prefill" if prefill else "attn_decode"
        took = seconds([row], operator, "attn_input_reshape", "attn_output_reshape")
        table = layer.chunk_attention if prefill else layer.decode_attention
        at = (new, cached) if prefill else (int(row["batch_size"]), cached + 1)
        assert table(*at) == pytest.approx(took, rel=0.2, abs=3e-6)  # some shapes were measured more than once
        assert table.covers(*at)
    assert not layer.chunk_attention.covers(4000, 4000)


def test_links_within_a_node_are_faster_than_between(profile):
    assert profile.send(2**24) < profile.send_between_nodes(2**24)
    assert "time per iteration" in profile.provenance["not_in_source"]


def test_files_of_another_model_are_refused_with_their_shapes():
    folder = needs_data("gpu")
    with pytest.raises(
        InputError, match=r"attention files .* do not fit 'llama-2-7b': they have n_q_head 64, n_kv_head 8"
    ):
        vidur_profile(builtin_model("llama-2-7b"), folder)
    with pytest.raises(InputError, match=r"mlp files .* do not fit 'llama-2-70b'"):
        vidur_profile(LLAMA, folder)


def test_a_folder_without_files_is_refused(tmp_path):
    with pytest.raises(InputError, match="no mlp file"):
        vidur_profile(LLAMA, tmp_path)
