"""The roofline: its tables are the rates' arithmetic, and unknown rates are refused."""

from dataclasses import replace

import pytest

from exegpt.cluster import parse_cluster
from exegpt.document import from_dict, to_dict
from exegpt.errors import InputError
from exegpt.model import ModelSpec
from exegpt.profile import Profile
from xprofiler.roofline import roofline_profile

OPT_13B = ModelSpec("opt-13b", "opt", 40, 5120, 40, 40, 128, 20480, False, 50272, 2048, tied_embeddings=True)


@pytest.fixture(scope="module")
def profile():
    return roofline_profile(OPT_13B, parse_cluster("4xA40"), "fp16")


def test_large_encoding_batches_are_bound_by_flops_and_small_decoding_batches_by_bytes(profile):
    layer = profile.degree(1).decoder
    products = sum(n * k for n, k in OPT_13B.layer_matrices())
    assert layer.rest(16384) == pytest.approx(2 * 16384 * products / (149.7e12 * 0.67), rel=1e-6)
    assert layer.rest(1) == pytest.approx(2 * products / (0.696e12 * 0.86), rel=1e-2)


def test_tensor_parallelism_divides_the_work_and_adds_the_all_reduces(profile):
    one, four = profile.degree(1).decoder, profile.degree(4).decoder
    reduce = 2 * (2 * 3 / 4 * 16384 * 5120 * 2 / 19e9 + 15e-6)
    assert four.rest(16384) == pytest.approx(one.rest(16384) / 4 + reduce, rel=1e-6)
    assert four.decode_attention(64, 1024) == pytest.approx(one.decode_attention(64, 1024) / 4, rel=1e-6)


def test_a_prompt_in_chunks_attends_to_as_much_as_a_whole_one(profile):
    layer = profile.degree(1).decoder
    whole = layer.encode_attention(1, 2048)
    halves = layer.chunk_attention(1024, 0) + layer.chunk_attention(1024, 1024)
    assert halves == pytest.approx(whole, rel=0.05)


def test_the_papers_encoding_and_decoding_times_come_out(profile):
    """Paper, Table 7: OPT-13B on 4 A40, task S: 1.68 s to encode (about 50 prompts), 0.038 s per decoding iteration."""
    tables = profile.degree(4)
    encode = 40 * (tables.decoder.rest(50 * 256.5) + tables.decoder.encode_attention(50, 256.5))
    decode = 40 * (tables.decoder.rest(160) + tables.decoder.decode_attention(160, 276)) + tables.head(160)
    assert encode == pytest.approx(1.68, rel=0.1)
    assert decode == pytest.approx(0.038, rel=0.1)


def test_a_profile_survives_the_way_through_json(profile):
    again = from_dict(Profile, to_dict(profile), "the profile")
    assert again == profile
    assert again.fingerprint == profile.fingerprint


def test_a_dtype_that_the_device_lacks_is_refused_with_those_it_has():
    with pytest.raises(InputError, match=r"'A40' has no rate for fp8: it has rates for fp16, bf16, fp32"):
        roofline_profile(OPT_13B, parse_cluster("4xA40"), "fp8")


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
