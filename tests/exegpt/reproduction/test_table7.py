"""Table 7: how far times of encoding and decoding spread, at the paper's schedules."""

import numpy as np
import pytest

from exegpt.reproduction import table7
from exegpt.reproduction.evenness import TimeSpread
from exegpt.reproduction.setup import setup
from exegpt.reproduction.table6 import PAPER


def test_a_range_is_half_of_where_99_percent_lie():
    """The middle three fifths are kept: what a run begins and ends with is not in it."""
    values = np.concatenate([np.full(500, 1e6), np.linspace(9, 11, 1500), np.full(500, -1e6)])
    spread = TimeSpread.of(values)
    assert spread.mean == pytest.approx(10, abs=1e-3) and spread.half_range == pytest.approx(0.99, abs=1e-3)


@pytest.mark.parametrize("place", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_adjustment_brings_encoding_near_the_papers_range(place):
    """±11.8 % under WAA and ±7.1 % under RRA; without adjustment it is more than twice as wide."""
    where, paper = setup("opt-13b", "4xA40", "S"), PAPER[place]
    plain, adjusted = (table7.row(where, paper, share, 3000) for share in (None, 0.05))
    share = adjusted.encode_s.half_range / adjusted.encode_s.mean
    assert share == pytest.approx({"waa-c": 0.118, "rra": 0.071}[paper.policy], abs=0.05)
    assert plain.encode_s.half_range > 2 * adjusted.encode_s.half_range
    assert plain.encode_s.mean == pytest.approx(adjusted.encode_s.mean, rel=0.03)
    (section,) = table7.sections(table7.Table7((plain, adjusted)))
    assert [row[1] for row in section.rows] == ["no", "yes"]
    said = {"waa-c": "0.85 ± 0.10 (11.8%)", "rra": "1.68 ± 0.12 (7.1%)"}[paper.policy]
    assert all(said in row for row in section.rows)
