"""Rooflines beside vLLM's measured rows: what is fitted, the promised errors, and the facts that answers print."""

from collections import Counter

import numpy as np
import pytest

from benchmarks.vllm_terms import (
    COUNTED,
    ENGINE,
    Comparison,
    compared,
    decoding_steps,
    groups,
    kv_dtype,
    parted,
    predictions,
    relative_errors,
    step_ms,
    vllm_rows,
)
from tests.public_data import needs_data
from xcore.specs.engine_spec import find_engine
from xprofiler.aiconfigurator import SYSTEMS, systems_folder
from xprofiler.roofline_errors import COMPARED

installed = pytest.mark.skipif(systems_folder() is None, reason="the package aiconfigurator is not installed")


@installed
def test_a_fifth_of_the_rows_is_fitted_by_a_rule_that_ignores_their_order():
    rows = vllm_rows()
    fitted, held_out = parted(rows)
    assert (len(rows), len(fitted), len(held_out)) == (165, 33, 132)
    assert parted(rows[::-1]) == (fitted, held_out)
    assert {(row.system, row.tp) for row in rows if kv_dtype(row) == "fp8"} == {("h200_sxm", 1), ("b200_sxm", 1)}


@installed
def test_facts_are_of_the_rows_that_nothing_was_fitted_to():
    _, held_out = parted(vllm_rows())
    counts = Counter((SYSTEMS[row.system], row.tp) for row in held_out)
    assert {(fact.device, fact.tp): fact.rows for fact in COMPARED if fact.engine == ENGINE} == counts


@installed
def test_few_clients_are_predicted_within_a_tenth_at_every_degree():
    _, held_out = parted(vllm_rows())
    few = [row for row in held_out if row.system in COUNTED and row.clients <= 8 and row.input + row.output == 2048]
    errors = relative_errors(few, predictions(few, Comparison(find_engine(ENGINE))))[:, 1]
    assert len(few) > 9 and {row.tp for row in few} == {1, 2, 4, 8}
    assert abs(errors).mean() < 0.06 and max(groups(few, errors).values()) < 0.1


@installed
def test_operator_tables_need_no_waits():
    _, held_out = parted(vllm_rows())
    few = [row for row in held_out if row.system == "h100_sxm" and row.clients == 4 and row.output == 1024]
    errors = relative_errors(few, predictions(few, Comparison(find_engine(ENGINE), tables=True)))[:, 1]
    assert abs(errors).mean() < 0.07


@pytest.mark.slow
@pytest.mark.timeout(1800)
@installed
def test_every_row_is_within_the_promised_errors_and_the_facts_are_current():
    _, rows = parted(vllm_rows())
    errors = relative_errors(rows, predictions(rows, Comparison(find_engine(ENGINE))))[:, 1]
    counted = [row.system in COUNTED for row in rows]
    assert abs(errors[counted]).mean() <= 0.09
    assert max(groups([r for r in rows if r.system in COUNTED], errors[counted]).values()) <= 0.15
    shipped = [fact for fact in COMPARED if fact.engine == ENGINE]
    imported = relative_errors(rows, predictions(rows, Comparison(find_engine(ENGINE), tables=True)))[:, 1]
    for fact, current in zip(shipped, compared(rows, errors, imported), strict=True):
        assert (fact.device, fact.tp, fact.rows) == (current.device, current.tp, current.rows)
        assert fact.median_error == pytest.approx(current.median_error, abs=0.002)
        assert fact.imported_error == pytest.approx(current.imported_error, abs=0.002)


def test_decoding_steps_without_an_all_reduce_are_predicted_on_one_device():
    needs_data("measured", "aic_fpm", "b300_vllm0.20.1_steps.csv.gz")
    steps = [step for step in decoding_steps() if step.tp == 1]
    errors = step_ms(steps, find_engine(ENGINE)) / np.array([step.ms for step in steps]) - 1
    assert len(steps) == 41 and np.median(abs(errors)) < 0.03 and abs(errors).max() < 0.2
