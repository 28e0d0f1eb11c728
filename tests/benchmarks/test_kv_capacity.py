"""KV capacities beside vLLM's start-up logs: the promised errors, and what is refused."""

from dataclasses import replace

import pytest

from benchmarks.kv_capacity import FILE, Capacity, Row, capacity, holds, rows

ROW = Row("log", "H100-80GB", 1, "llama-3.1-8b", "bf16", "bf16", "TP1", 0.95, "0.19.0", 8192, 476_016)


@pytest.fixture(scope="module")
def logged():
    if not FILE.exists():
        pytest.skip(f"the logs' figures are not here: {FILE}")
    return rows()


def test_every_promise_holds(logged):
    promised = [row for row in logged if row.promised or not row.kv_tokens]
    assert len(promised) == 13 and [row.name for row in promised if not holds(row, capacity(row))] == []


def test_earlier_versions_are_near_too(logged):
    earlier = [(row, capacity(row)) for row in logged if not row.promised and row.kv_tokens]
    assert len(earlier) == 8 and max(abs(found.tokens / row.kv_tokens - 1) for row, found in earlier) < 0.1


@pytest.mark.parametrize(
    ("gib", "tokens", "kept"),
    [(58.0, 470_000, True), (57.4, 470_000, False), (58.0, 440_000, False), (58.8, 476_016, False)],
)
def test_a_promise_is_broken_by_either_error(gib, tokens, kept):
    assert holds(ROW, Capacity(gib, 58.1, tokens)) is kept


def test_where_little_is_left_only_the_gib_count_and_nothing_must_be_nothing():
    assert holds(ROW, Capacity(3.4, 3.0, 100)) and not holds(ROW, Capacity(3.7, 3.0, 100))
    idle = replace(ROW, kv_tokens=0)
    assert holds(idle, Capacity(-1.0, 0.0, 0)) and not holds(idle, Capacity(1.0, 0.0, 16))


def test_a_row_of_a_date_is_of_an_early_version():
    assert ROW.promised and not replace(ROW, vllm="2024-11").promised and not replace(ROW, vllm="0.15.0").promised
