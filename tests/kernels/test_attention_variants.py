"""Windows, both-ways attention, first seen tokens and relative position biases: kernel and reference against PyTorch's
attention with the mask written out."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from exegpt.kernels.attention import attention, attention_reference

from .test_attention import paged


def masked(q, plain, news, contexts, scale=None, window=None, causal=True, starts=None, bias=None):
    """PyTorch's attention with an explicit additive mask, sequence by sequence, pair by pair."""
    out, begin = [], 0
    for i, ((k, v), new, context) in enumerate(zip(plain, news, contexts, strict=True)):
        mask = torch.zeros(q.shape[1], new, context)
        for row in range(new):
            place = context - new + row
            for t in range(context):
                hidden = causal and (t > place or (window is not None and t <= place - window))
                if hidden or (starts is not None and t < starts[i]):
                    mask[:, row, t] = -torch.inf
                elif bias is not None:
                    reach = bias.shape[1] // 2
                    mask[:, row, t] = bias[:, reach + max(-reach, min(t - place, reach))]
        queries = q[begin : begin + new].transpose(0, 1)
        k, v = (t.transpose(0, 1).repeat_interleave(q.shape[1] // k.shape[1], 0) for t in (k, v))
        attended = F.scaled_dot_product_attention(queries[None], k[None], v[None], attn_mask=mask, scale=scale)[0]
        out.append(attended.transpose(0, 1))
        begin += new
    return torch.cat(out)


def assert_equal(sizes, heads, kv_heads, head_size, block_size, **options):
    news, contexts = zip(*sizes, strict=True)
    q, plain, cache = paged(news, contexts, heads, kv_heads, head_size, block_size)
    expected = masked(q, plain, news, contexts, **options)
    torch.testing.assert_close(attention_reference(q, *cache, **options), expected, atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(attention(q, *cache, **options), expected, atol=3e-6, rtol=1e-5)


BIAS = torch.randn(6, 2 * 9 + 1, generator=torch.Generator().manual_seed(2))
PROMPTS = ((5, 5), (1, 1), (33, 33), (16, 16))
PIECES = ((7, 40), (1, 18), (20, 36))
DECODING = ((1, 1), (1, 16), (1, 37))


@pytest.mark.parametrize("sizes", [PROMPTS, PIECES, DECODING])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size", "block_size"), [(6, 3, 12, 3), (6, 6, 8, 16)])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 5},
        {"window": 21, "scale": 0.3},
        {"window": 1000},
        {"causal": False},
        {"bias": BIAS},
        {"bias": BIAS, "causal": False, "scale": 1.0},
        {"bias": BIAS, "window": 12, "scale": 1.0},
    ],
    ids=lambda options: "-".join(options),
)
def test_variants(sizes, heads, kv_heads, head_size, block_size, options):
    assert_equal(sizes, heads, kv_heads, head_size, block_size, **options)


@pytest.mark.slow
@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=4),
    st.one_of(st.none(), st.integers(1, 30)),
    st.booleans(),
    st.booleans(),
)
def test_any_variant(rows, window, causal, biased):
    sizes = [(new, past + new) for new, past, _ in rows]
    starts = torch.tensor([min(start, past) for _, past, start in rows], dtype=torch.int32)
    assert_equal(
        sizes, 6, 2, 16, 16, window=window, causal=causal, starts=starts, bias=BIAS if biased else None, scale=0.5
    )


def test_what_lies_before_the_first_seen_token_is_never_read():
    q, _, cache = paged((1, 3), (37, 25), 4, 2, 16, 16)
    keys, values, tables, _, _ = cache
    options = {"starts": torch.tensor([20, 20], dtype=torch.int32)}
    expected = attention(q, *cache, **options)
    for block, place in ((tables[:, 0].long(), slice(0, 16)), (tables[:, 1].long(), slice(0, 4))):
        keys[block, :, :, place] = 1e9
        values[block, :, place] = 1e9
    torch.testing.assert_close(attention(q, *cache, **options), expected, atol=0, rtol=0)
