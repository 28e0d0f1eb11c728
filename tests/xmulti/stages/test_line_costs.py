"""Iterations cost what the table's lines say, at measured batches and between them."""

import pytest

from tests.xmulti.stages import applications
from xmulti.stages.line_costs import line_costs


def by_lines(phase, at, x_compute, x_prepare, x_sample):
    lines = zip((phase.compute[at], phase.prepare[at], phase.sample[at]), (x_compute, x_prepare, x_sample), strict=True)
    return sum(slope * x + intercept for (slope, intercept), x in lines)


def test_padded_prompts_are_all_as_long_as_the_longest():
    degree = applications.degree(2)
    macs = 4 * (degree.macs_per_token * 30 + degree.macs_per_position * 30**2)
    expected = by_lines(degree.prefill, 1, macs, 4 * 30, 60)
    assert line_costs(degree).prefill_s([5, 10, 15, 30]) == pytest.approx(expected, rel=1e-12)


def test_without_padding_each_prompt_is_as_long_as_it_is():
    degree = applications.degree(1)
    macs = degree.macs_per_token * 60 + degree.macs_per_position * (25 + 100 + 225 + 900)
    expected = by_lines(degree.prefill, 1, macs, 60, 60)
    assert line_costs(degree, padded=False).prefill_s([5, 10, 15, 30]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("padded", [True, False])
def test_decoding_counts_the_sum_of_lengths(padded):
    degree = applications.degree(1)
    lengths = [5, 10, 15, 31]
    macs = degree.macs_per_token * 4 + degree.macs_per_position * 61
    expected = by_lines(degree.decode, 1, macs, 4 * 31 if padded else 61, 61)
    assert line_costs(degree, padded).decode_s(lengths) == pytest.approx(expected, rel=1e-12)


def test_costs_rise_between_measured_batches():
    costs = line_costs(applications.degree(1))
    seconds = [costs.decode_s([20] * batch) for batch in range(1, 513)]
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]
    assert costs.blocks == 4096 // 16
