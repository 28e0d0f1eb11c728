"""Rows from which no token can be sampled give NO_TOKEN, whatever chooses the tokens, and change no other row."""

import math
from dataclasses import replace

import pytest
import torch

from exegpt.kernels.argmax import NO_TOKEN, argmax, argmax_reference
from exegpt.kernels.greatest import greatest
from exegpt.kernels.log_probs import LogProbs, log_probs, log_probs_reference
from exegpt.kernels.sampling import sample, sample_reference

from .gpu import needs_triton, there
from .test_sampling import edited, mixed, over_there, sampling

VOCAB = 600
"""More than a chunk of every kernel."""


def a_nan(row, sign):
    row[VOCAB - 3] = sign * math.nan


BROKEN = {
    "all NaN": lambda row: row.fill_(math.nan),
    "all NaN with a sign": lambda row: row.fill_(-math.nan),
    "one NaN": lambda row: a_nan(row, 1),
    "one NaN with a sign": lambda row: a_nan(row, -1),
    "the first NaN": lambda row: row[:1].fill_(math.nan),
    "an overflow": lambda row: row[300:301].fill_(math.inf),
    "all ruled out": lambda row: row.fill_(-math.inf),
}


def by_triton(logits, how):
    from exegpt.kernels.logit_edits import edit_logits_reference
    from exegpt.kernels.sampling_gpu import sample_gpu

    if how.edits is not None:
        logits = edit_logits_reference(logits, how.edits)
    return sample_gpu(there(logits), over_there(replace(how, edits=None)), block_size=512).cpu()


SAMPLERS = {"cpu": sample, "reference": sample_reference, "triton": pytest.param(by_triton, marks=needs_triton)}


def halves(rows):
    """Logits of which every other row is broken, each in another way."""
    logits, _ = mixed(2 * rows, VOCAB)
    for row, spoil in zip(logits[::2], list(BROKEN.values()) * 2, strict=False):
        spoil(row)
    return logits


@pytest.mark.parametrize("choose", [argmax, argmax_reference])
def test_greedily(choose):
    logits = halves(len(BROKEN))
    tokens = choose(logits)
    assert (tokens[::2] == NO_TOKEN).all() and torch.equal(tokens[1::2], logits[1::2].argmax(1))


@pytest.mark.parametrize("draw", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize(
    "options",
    [{"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.1}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_at_random(draw, options):
    logits = halves(len(BROKEN))
    how = sampling(len(logits), **options)
    tokens, healthy = draw(logits, how), logits.clone()
    healthy[::2] = 0
    assert (tokens[::2] == NO_TOKEN).all() and torch.equal(tokens[1::2], draw(healthy, how)[1::2])


@pytest.mark.parametrize("draw", SAMPLERS.values(), ids=SAMPLERS)
def test_penalties_biases_and_masks_hide_nothing(draw):
    logits, how = edited(2 * len(BROKEN), VOCAB)
    expected = draw(logits, how)
    logits[::2] = halves(len(BROKEN))[::2]
    tokens = draw(logits, how)
    assert (expected != NO_TOKEN).all()
    assert (tokens[::2] == NO_TOKEN).all() and torch.equal(tokens[1::2], expected[1::2])


@needs_triton
def test_a_mask_of_a_gpu_leaves_what_is_not_finite():
    from exegpt.kernels.logit_edits import edit_logits_reference
    from exegpt.kernels.logit_edits_gpu import edit_rows_gpu

    logits, how = edited(2 * len(BROKEN), VOCAB)
    logits[::2] = halves(len(BROKEN))[::2]
    edits = replace(how.edits, biased=how.edits.biased[:, :0], bias=how.edits.bias[:0])
    got = there(logits.clone())
    edit_rows_gpu(got, over_there(replace(how, edits=edits)).edits)
    torch.testing.assert_close(got.cpu(), edit_logits_reference(logits, edits), equal_nan=True)


@pytest.mark.parametrize("make", [log_probs, log_probs_reference])
def test_log_probabilities_of_no_token_are_nan_or_minus_infinity(make):
    logits = halves(len(BROKEN))
    tokens = argmax(logits).clamp(min=0) if make is log_probs_reference else argmax(logits)
    out = make(logits, tokens, LogProbs(torch.arange(len(logits)), 3))
    assert not out[::2, 0].isfinite().any() and out[1::2].isfinite().all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("place", [0, 40, 99])
def test_the_greatest_of_some_is_nan_where_one_is(place, sign):
    values = torch.randn(100)
    assert greatest(values.numpy()) == values.max()
    values[place] = sign * math.nan
    assert math.isnan(greatest(values.numpy()))
