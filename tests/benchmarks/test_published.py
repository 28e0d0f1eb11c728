"""Rooflines beside TensorRT-LLM's published throughputs: the promised errors, and the facts that answers print."""

from collections import Counter

import numpy as np
import pytest

from benchmarks.published import ENGINE, compared, errors, operator_tables, parted, published_rows
from tests.public_data import needs_data
from xcore.specs.engine_spec import NO_ENGINE, find_engine
from xprofiler.aiconfigurator import systems_folder
from xprofiler.roofline_errors import COMPARED

SHIPPED = [fact for fact in COMPARED if fact.engine == ENGINE]


@pytest.fixture(scope="module")
def rows():
    needs_data("published", "trtllm_perf.csv")
    return published_rows()


def test_at_most_a_fifth_of_the_rows_is_fitted_by_a_rule_that_ignores_their_order(rows):
    fitted, held_out = parted(rows)
    assert len(rows) == 406 and len(fitted) <= len(rows) / 5 and len(fitted) + len(held_out) == len(rows)
    assert parted(rows[::-1]) == (fitted, held_out)
    assert {row.tp for row in fitted} == {1, 2, 4, 8} and len({row.device for row in fitted}) == 4


def test_facts_are_of_the_rows_that_nothing_was_fitted_to(rows):
    _, held_out = parted(rows)
    counts = Counter((row.device, row.tp) for row in held_out)
    assert {(fact.device, fact.tp): fact.rows for fact in SHIPPED} == counts


def test_a_few_of_the_rows_are_predicted_within_a_tenth(rows):
    """Two of each degree, those with the fewest requests; the slow test has all."""
    _, held_out = parted(rows)
    few = [sorted((r for r in held_out if r.tp == tp), key=lambda r: (r.requests, r.order))[:2] for tp in (1, 2, 4, 8)]
    row_errors = errors([row for group in few for row in group], find_engine(ENGINE))
    assert len(row_errors) == 8 and np.median(abs(row_errors)) <= 0.10


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_row_is_within_the_promised_errors_and_the_facts_are_current(rows):
    _, held_out = parted(rows)
    row_errors = errors(held_out, find_engine(ENGINE))
    assert np.median(abs(row_errors)) <= 0.07 and abs(np.median(row_errors)) <= 0.04
    for key in ("tp", "device"):
        for value in {getattr(row, key) for row in held_out}:
            assert np.median(abs(row_errors[[getattr(row, key) == value for row in held_out]])) <= 0.10
    installed = systems_folder() is not None
    imported = errors(held_out, find_engine(ENGINE), operator_tables) if installed else np.zeros(len(held_out))
    for shipped, fact in zip(SHIPPED, compared(held_out, row_errors, imported), strict=True):
        assert (shipped.device, shipped.tp, shipped.rows) == (fact.device, fact.tp, fact.rows)
        assert shipped.median_error == pytest.approx(fact.median_error, abs=0.002)
        assert shipped.beyond_quarter == pytest.approx(fact.beyond_quarter, abs=0.002)
        assert not installed or shipped.imported_error == pytest.approx(fact.imported_error, abs=0.002)
    assert np.median(abs(errors(held_out, NO_ENGINE))) <= 0.12
