"""Search cost on the smallest scenario: all searches of one space, and the oracle among them."""

import pytest

from exegpt.reproduction import search_cost


@pytest.mark.slow
def test_branch_and_bound_reaches_the_exhaustive_optimum(monkeypatch):
    monkeypatch.setattr(search_cost, "SCENARIOS", (("opt-13b", "4xA40", "S"),))
    monkeypatch.setattr(search_cost, "SPACES", ("WAA",))
    rows = {row.method: row for row in search_cost.reproduce(exhaustive_points=10_000).rows}
    assert rows.keys() == search_cost.METHODS.keys()
    assert all(row.exact and row.points == rows["exhaustive"].evaluations for row in rows.values())
    assert rows["exhaustive"].reached == 1.0
    assert rows["branch and bound"].reached == pytest.approx(1.0, abs=0.001)
    assert rows["branch and bound"].evaluations < 0.1 * rows["exhaustive"].evaluations
    (section,) = search_cost.sections(search_cost.SearchCost(tuple(rows.values())))
    assert len(section.rows) == 4


@pytest.mark.slow
def test_large_spaces_are_not_searched_exhaustively(monkeypatch):
    monkeypatch.setattr(search_cost, "SCENARIOS", (("opt-13b", "4xA40", "T"),))
    monkeypatch.setattr(search_cost, "SPACES", ("RRA",))
    rows = search_cost.reproduce(exhaustive_points=10).rows
    assert "exhaustive" not in {row.method for row in rows} and not any(row.exact for row in rows)
