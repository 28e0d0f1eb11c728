"""Log-probabilities: numpy's, ties by the lower token, and the same in any batch."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exegpt.kernels.log_probs import LogProbs, log_probs, log_probs_reference

from .gpu import there

WAYS = pytest.mark.parametrize("way", [log_probs, log_probs_reference])


@WAYS
@settings(max_examples=40)
@given(st.integers(1, 8), st.integers(1, 500), st.integers(0, 10**6), st.data())
def test_numpys_in_any_batch(way, rows, vocab, seed, data):
    """Steps of a quarter: many logits are equal, both zeros among them."""
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=g) * 12).round() / 4
    tokens = torch.randint(0, vocab, (rows,), generator=g)
    asked = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, unique=True))
    most = data.draw(st.integers(0, min(20, vocab)))
    found = way(*there(logits, tokens), LogProbs(there(torch.tensor(asked)), most)).cpu().numpy()
    x = logits.double().numpy()
    x -= numpy.log(numpy.exp(x).sum(axis=1, keepdims=True))
    for row, (own, *best) in zip(asked, found, strict=True):
        order = numpy.argsort(-logits[row].numpy(), kind="stable")[:most]
        assert own == pytest.approx(x[row, tokens[row]], rel=1e-5, abs=1e-5)
        assert best[most:] == order.tolist() and best[:most] == pytest.approx(
            x[row, order].tolist(), rel=1e-5, abs=1e-5
        )
        alone = way(*there(logits[[row]], tokens[[row]]), LogProbs(there(torch.tensor([0])), most))
        assert alone[0].tolist() == [own, *best]


@WAYS
def test_a_large_row_is_summed_alike_alone_and_in_a_batch(way):
    """Threads share the sum of a single row where it is a reduction: here they must not."""
    logits = torch.randn(3, 130_000).to(torch.bfloat16)
    tokens, before = torch.tensor([5, 70, 129_999]), torch.get_num_threads()
    together = way(logits, tokens, LogProbs(torch.arange(3), 4))
    try:
        torch.set_num_threads(2)
        for row in range(3):
            alone = way(logits[[row]], tokens[[row]], LogProbs(torch.tensor([0]), 4))
            assert torch.equal(alone[0], together[row])
    finally:
        torch.set_num_threads(before)


@WAYS
def test_a_ruled_out_token_is_minus_infinity(way):
    logits = torch.tensor([[0.0, -torch.inf, 0.0]])
    found = way(logits, torch.tensor([1]), LogProbs(torch.tensor([0]), 3))
    half = pytest.approx(-numpy.log(2))
    assert found[0].tolist() == [-numpy.inf, half, half, -numpy.inf, 0, 2, 1]
