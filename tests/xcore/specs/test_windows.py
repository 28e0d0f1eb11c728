"""What tokens see in layers with windows, counted one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcore.specs.builtin_models import builtin_model
from xcore.specs.windows import Windows


def sees(position: int, size: int, kind: str) -> int:
    """The tokens that the token at a position sees, itself and earlier ones."""
    return min(position + 1, size) if kind == "sliding" else position % size + 1


@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 20), st.sampled_from(["sliding", "chunks"]))
def test_seen_is_the_sum_over_the_tokens(new, past, size, kind):
    windows = Windows(size, 1, kind)
    exact = sum(sees(position, size, kind) for position in range(past, past + new))
    if kind == "sliding" or past < size:
        assert windows.seen(new, past) == exact
    else:  # the mean over positions
        assert windows.seen(new, past) == pytest.approx(exact, abs=size * size)
    assert windows.read(past) <= past and windows.kept(past) == min(past, size)


def test_a_model_has_the_mean_of_its_layers():
    gpt = builtin_model("gpt-oss-120b")
    assert gpt.seen(1, 999) == (128 + 1000) / 2 and gpt.read(999) == (127 + 999) / 2
    assert gpt.kept_share(1000) == pytest.approx((0.128 + 1) / 2)
    assert gpt.layers * gpt.kv_bytes(1, "bf16") == 73_728
    everything = builtin_model("llama-3.1-8b")
    assert everything.kept_share(1000) == 1.0 and everything.read(999) == 999


def test_latent_attention_caches_one_vector_for_all_heads():
    deepseek = builtin_model("deepseek-v3")
    assert deepseek.layers * deepseek.kv_bytes(1, "bf16") == deepseek.layers * deepseek.kv_bytes(8, "bf16") == 70_272
    assert 2 * 128 * deepseek.latent.prompt_pair == 81_920
    assert 2 * 128 * deepseek.latent.decode_pair == 278_528
    glm = builtin_model("glm-5")
    assert glm.seen(1, 9999) == glm.read(9999) + 1 == 2048
