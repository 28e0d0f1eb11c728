"""The scan beside which the search is put: its grids, and what it finds where every point can be evaluated."""

import itertools

import pytest

from benchmarks import optimum
from benchmarks.optimum import Asked, Scan, coarse, problem_of, rising, spaces


def test_grids_leave_no_gap_wider_than_their_ratio():
    values = rising(1, 5000, 1.01, 64)
    assert values[:64] == list(range(1, 65)) and values[-1] == 5000
    assert all(a < b <= max(a + 1, 1.01 * a + 1) for a, b in itertools.pairwise(values))
    places = coarse(values)
    assert places[0] == 0 and places[-1] == len(values) - 1
    assert all(b == a + 1 or values[b - 1] < optimum.COARSE * values[a] for a, b in itertools.pairwise(places))


@pytest.mark.parametrize(
    ("policy", "bounds"), [("static", {"latency_s": 6.0}), ("waa-c", {"tpot_s": 0.05}), ("hybrid", {})]
)
def test_a_scan_finds_the_best_of_all_points(monkeypatch, policy, bounds):
    monkeypatch.setattr(optimum, "MOST_BATCH", 24)
    asked = Asked("llama-3.1-8b", "2xL40S", "512/64", **bounds)
    question = problem_of(asked, policy)
    best = 0.0
    for space in spaces(policy, question):
        for place in range(24):
            if space.meets((place,)):
                best = max(best, space.at((place,)).throughput)
    scan = Scan(question, policy).run()
    assert scan.throughput == best > 0
    assert scan.best["replicas"] >= 1


def test_a_question_reads_as_one_line():
    assert str(Asked("llama-3.1-8b", "2xL40S", "S", "fp8", tpot_s=0.02)) == "llama-3.1-8b fp8 2xL40S S, TPOT 0.02 s"
