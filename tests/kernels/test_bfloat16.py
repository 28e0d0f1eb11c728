"""The CPU's kernels in bfloat16: what the references give in float32, rounded once."""

import numpy as np
import pytest
import torch
from numba import njit

from exegpt.kernels.argmax import NO_TOKEN, argmax, argmax_reference
from exegpt.kernels.attention import attention, attention_reference
from exegpt.kernels.bfloat16 import rounded, widened
from exegpt.kernels.kernel_dtypes import array_of
from exegpt.kernels.kv_write import kv_write, kv_write_reference
from exegpt.kernels.log_probs import LogProbs, log_probs, log_probs_reference
from exegpt.kernels.norm import rms_norm, rms_norm_reference
from exegpt.kernels.rotary import rotate, rotate_and_write, rotate_and_write_reference, rotate_reference
from exegpt.kernels.sampling import sample
from exegpt.kernels.swiglu import geglu, geglu_reference, swiglu, swiglu_reference

from .test_attention import paged
from .test_rows import new_tokens
from .test_sampling import edited, mixed

BF16 = torch.bfloat16


def assert_rounded(got, exact, atol=1e-6):
    """Compare with results of higher precision: at least 97 of 100 are rounded to the nearest."""
    assert got.dtype == BF16
    torch.testing.assert_close(got.to(exact.dtype), exact, rtol=2**-8, atol=atol, equal_nan=True)
    same = (got == exact.to(BF16)) | exact.isnan()
    assert same.double().mean() > 0.97


def test_rounding_is_torchs():
    @njit
    def there_and_back(x, narrow, wide):
        for i in range(len(x)):
            narrow[i] = rounded(x[i], narrow)
            wide[i] = widened(narrow[i])

    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    bits[:5] = 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0xFF800000, 0x7F800001  # ties, overflow, -inf, a NaN
    x = torch.from_numpy(bits.view(np.float32))
    narrow, wide = torch.empty(x.shape, dtype=BF16), torch.empty(x.shape)
    there_and_back(x.numpy(), array_of(narrow), wide.numpy())
    torch.testing.assert_close(narrow, x.to(BF16), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(wide, narrow.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (65, 7), (3, 513)])
def test_rows(rows, width):
    x, w = (torch.randn(rows, 2 * width) * 3).to(BF16), torch.rand(2 * width).to(BF16)
    assert_rounded(rms_norm(x, w, 1e-5), rms_norm_reference(x.float(), w.float(), 1e-5))
    assert_rounded(swiglu(x), swiglu_reference(x.double()))
    assert_rounded(geglu(x), geglu_reference(x.double()))


@pytest.mark.parametrize("broken", [None, torch.nan, torch.inf])
def test_new_tokens(broken):
    qkv, where, slots, cache = new_tokens(37, 4, 2, 24, 16, dtype=BF16)
    if broken:
        qkv[3, 7, 5] = broken
    exact, plain = qkv.float(), [t.float() for t in cache]
    other, written = qkv.clone(), [t.clone() for t in cache]
    rotate_and_write(qkv[:, :4], qkv[:, 4:6], qkv[:, 6:], *where, *cache, slots)
    kv_write(other[:, 4:6], other[:, 6:], *written, slots)
    kept = [t.clone() for t in plain]
    kv_write_reference(exact[:, 4:6], exact[:, 6:], *kept, slots)
    rotate_and_write_reference(exact[:, :4], exact[:, 4:6], exact[:, 6:], *where, *plain, slots)
    for got, expected in zip((qkv[:, :4], *cache, *written), (exact[:, :4], *plain, *kept), strict=True):
        assert_rounded(got, expected)
    twice = qkv[:, :4].float()
    rotate(qkv[:, :4], *where)
    rotate_reference(twice, *where)
    assert_rounded(qkv[:, :4], twice)


@pytest.mark.parametrize(
    ("news", "contexts", "options"),
    [
        ((1, 1, 1), (1, 16, 300), {}),
        ((5, 1, 33), (5, 18, 36), {"window": 9}),
        (
            (5, 33),
            (5, 33),
            {"causal": False, "scale": 1.0, "bias": torch.randn(8, 21, generator=torch.Generator().manual_seed(0))},
        ),
    ],
)
def test_attention(news, contexts, options):
    q, _, (keys, values, *rest) = paged(news, contexts, 8, 4, 64, 16, dtype=BF16)
    exact = attention_reference(q.float(), keys.float(), values.float(), *rest, **options)
    largest = options.get("scale", 64**-0.5) * float(q.float().norm(dim=-1).max()) ** 2  # keys are as long as queries
    assert_rounded(attention(q, keys, values, *rest, **options), exact, atol=2**-24 * largest)  # a score's rounding


@pytest.mark.parametrize("vocab", [1, 511, 1500])
def test_argmax(vocab):
    x = torch.randn(9, vocab).to(BF16)  # with many equal values
    assert torch.equal(argmax(x), argmax_reference(x))
    x[4] = -torch.inf
    x[5, vocab // 2] = torch.nan
    assert argmax(x)[4:6].tolist() == [NO_TOKEN] * 2


@pytest.mark.parametrize("logits_of", [mixed, edited])
def test_sampling_and_log_probs_are_those_of_the_widened_logits(logits_of):
    logits, how = logits_of(40, 1000)
    logits = logits.to(BF16)
    tokens = sample(logits, how)
    assert torch.equal(tokens, sample(logits.float(), how))
    asked = LogProbs(torch.tensor([3, 39]), 5)
    expected = log_probs_reference(logits, tokens.clamp(min=0), asked)
    torch.testing.assert_close(log_probs(logits, tokens, asked), expected, atol=1e-5, rtol=1e-6)


def test_the_greatest_of_bfloat16_logits():
    logits = torch.randn(9, 3001, generator=torch.Generator().manual_seed(3)).to(BF16)
    logits[1:3] = -logits[1:3].abs() - 1
    logits[3, 7], logits[4, 9], logits[5, 2999], logits[6] = torch.nan, -torch.nan, torch.inf, -torch.inf
    logits[7, [12, 900]] = 100.0
    logits[8] = 0.0
    logits[8, :40] = -0.0
    assert torch.equal(argmax(logits), argmax_reference(logits.float()))
    assert argmax(logits)[3:8].tolist() == [NO_TOKEN, NO_TOKEN, NO_TOKEN, NO_TOKEN, 12]
