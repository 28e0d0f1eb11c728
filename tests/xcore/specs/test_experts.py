"""How many experts a batch reads, and how unevenly ranks share them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcore.errors import InputError
from xcore.specs.experts import Experts

SKEWS = (0.0, 0.6, 1.0, 1.01, 1.2)


@pytest.mark.parametrize(("tokens", "read"), [(1, 8), (4, 29.1), (16, 82.4), (64, 125.9)])
def test_experts_that_are_all_as_likely(tokens, read):
    assert Experts(128, 8, 768, 48, skew=0).distinct(tokens) == pytest.approx(read, abs=0.05)


@pytest.mark.parametrize("skew", SKEWS)
def test_a_batch_reads_as_many_as_its_tokens_choose(skew):
    """Systematic sampling gives each token k experts, each with its chance."""
    experts, tokens, trials = Experts(64, 6, 1, 1, skew=skew), 40, 300
    edges = np.concatenate([[0.0], np.cumsum(experts._chances(tokens))])
    generator = np.random.default_rng(0)
    read = []
    for _ in range(trials):
        points = generator.random((tokens, 1)) + np.arange(6)
        chosen = np.searchsorted(edges, points, side="right") - 1
        assert all(len(set(row)) == 6 for row in chosen)
        read.append(len(np.unique(chosen)))
    assert experts.distinct(tokens) == pytest.approx(np.mean(read), rel=0.02)


@given(
    count=st.integers(1, 300),
    data=st.data(),
    tokens=st.floats(0.5, 1e5),
    skew=st.sampled_from(SKEWS),
)
def test_between_k_and_all_and_never_fewer_with_more_tokens(count, data, tokens, skew):
    per_token = data.draw(st.integers(1, count))
    experts = Experts(count, per_token, 1, 1, skew=skew)
    chances = experts._chances(tokens)
    assert sum(chances) == pytest.approx(per_token) and 0 < min(chances) <= max(chances) <= 1 + 1e-12
    assert min(tokens, 1.0) * per_token * (1 - 1e-9) <= experts.distinct(tokens) <= count * (1 + 1e-9)
    for ranks in (1, 2, 4):
        if count % ranks == 0:
            assert 1 - 1e-9 <= experts.fullest(tokens, ranks) <= ranks


def test_loads_are_those_of_the_published_power_law():
    """aiconfigurator's documentation: at exponent 1.2, a fifth of 128 experts has most of the tokens."""
    loads = sorted(Experts(128, 8, 1, 1, skew=1.2)._chances(1024), reverse=True)
    assert sum(loads[:26]) / 8 == pytest.approx(0.84, abs=0.03)


@pytest.mark.parametrize("wrong", [{"per_token": 9}, {"per_token": 0}, {"layers": 0}, {"skew": -1.0}])
def test_sizes_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InputError):
        Experts(**({"count": 8, "per_token": 2, "ffn": 4, "layers": 1} | wrong))
