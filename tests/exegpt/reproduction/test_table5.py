"""Table 5's counting on sweeps whose answer is plain, and one of its grids."""

import numpy as np
import pytest

from exegpt.reproduction import table5
from exegpt.reproduction.setup import setup

NAN = float("nan")


@pytest.mark.parametrize(
    ("sweep", "tolerance", "broken"),
    [
        ([1.0, 2.0, 3.0], 0.0, 0),
        ([1.0, 3.0, 2.0, 2.5], 0.0, 2),  # both lie below the 3 before them
        ([1.0, 3.0, 2.96, 2.0], 0.02, 1),
        ([3.0, 2.0, 1.0], 0.5, 1),
        ([1.0, NAN, 0.5, NAN], 0.1, 1),
    ],
)
def test_points_below_an_earlier_one(sweep, tolerance, broken):
    points = sum(value == value for value in sweep)
    assert table5.non_monotone(np.array(sweep), 0, tolerance) == (broken, points)
    grid = np.stack([np.array(sweep), np.arange(1.0, len(sweep) + 1)], axis=1)  # another sweep beside it is in order
    assert table5.non_monotone(grid, 0, tolerance) == (broken, points + len(sweep))


def test_every_cell_of_the_paper_stands_beside_one_of_ours(monkeypatch):
    grid = np.arange(1.0, 2 * 3 * 4 * 2 + 1).reshape(2, 3, 4, 2)
    monkeypatch.setattr(table5, "grids", lambda where, policy: iter([grid, grid[::-1]]))
    cells = table5.reproduce().cells
    assert sum(cell.paper is not None for cell in cells) == 30
    along_groups = [cell for cell in cells if cell.variable == "T_P"]
    assert {(cell.latency, cell.throughput) for cell in along_groups} == {(0.25, 0.25)}  # one of two grids falls
    assert all(cell.throughput == 0 for cell in cells if cell.variable != "T_P")
    (section,) = table5.sections(table5.Table5(cells))
    assert len(section.rows) == 12 and all(len(row) == len(section.columns) for row in section.rows)


def test_rra_is_nearly_monotone_in_its_own_variables(monkeypatch):
    """The paper: below 2.3 percent of the points, at any tolerance."""
    monkeypatch.setattr(table5, "ENCODE_BATCHES", (1, 2, 4, 8, 16, 32, 64))
    monkeypatch.setattr(table5, "DECODE_ITERATIONS", (64, 32, 16, 8, 4, 2))
    grid = next(table5.grids(setup("gpt3-39b", "2x8xA40", "S"), "rra"))
    for axis in (1, 2):
        for kind in range(2):
            broken, points = table5.non_monotone(grid[..., kind], axis, 0.02)
            assert points > 100 and broken / points < 0.03
