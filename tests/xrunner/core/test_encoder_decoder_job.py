"""An encoder-decoder on the ranks of a job: the tokens of transformers, and the decisions of the simulator."""

import dataclasses
import itertools
from collections import Counter

import pytest

from tests.xcore.small_specs import changed
from tests.xrunner.cells import LAYOUTS, LENGTHS, requests
from xcore.batching import deal

from .test_job import check_decisions, check_times, check_tokens, cut_at, matrix, run_cells, sides

POLICIES = ("static", "hybrid", "orca", "rra")


def check(facts, cells, theirs):
    for name, (_, plan) in cells.items():
        try:
            check_tokens(facts[name], theirs)
            check_times(facts[name])
            if plan.policy == "waa-m":
                check_work(facts[name], plan)
            else:
                check_decisions(facts[name], plan)
        except AssertionError as error:
            raise AssertionError(name) from error


def check_work(facts, plan):
    """Every device of a side computes every token of that side once: each output token is decoded."""
    per_replica = sum(len(stage.devices) for stage in plan.stages)
    for replica, stage in itertools.product(range(plan.replicas), plan.stages):
        lengths = [LENGTHS[i] for i in deal(LENGTHS, plan.replicas)[replica]]
        expected = sum(n if stage.phase == "encode" else m for n, m in lengths)
        for device in stage.devices:
            spans = [s for s in facts["spans"] if s["device"] == replica * per_replica + device]
            assert sum(s["tokens"] for s in spans) == expected
            assert {s["phase"] for s in spans} == {stage.phase}


@pytest.mark.slow
def test_two_stages(job, tmp_path, encoder_decoder):
    paths, theirs = encoder_decoder
    cells = matrix(paths, 2, ["t5"], POLICIES, [((1, 1), 1)])
    check(run_cells(job, tmp_path, paths, 2, cells), cells, theirs)


@pytest.mark.slow
def test_disaggregated(job, tmp_path, encoder_decoder):
    """With room for few residents, too, where encoding waits for blocks."""
    paths, theirs = encoder_decoder
    cells = sides(paths, 2, ["t5"], (1,))
    cells |= {f"full-{name}": cell for name, cell in sides(paths, 2, ["t5"], (3,), kv_blocks=9).items()}
    check(run_cells(job, tmp_path, paths, 2, cells), cells, theirs)


@pytest.mark.slow
def test_stages_and_sides_of_different_degrees(job, tmp_path, encoder_decoder):
    paths, theirs = encoder_decoder
    cells = matrix(paths, 4, ["t5"], ["orca", "rra"], [((2, 1, 1), 1), ((1, 1, 2), 1)])
    cells |= sides(paths, 4, ["t5"], (2,), [((1, 1), (2,), 1)])
    check(run_cells(job, tmp_path, paths, 4, cells), cells, theirs)


@pytest.mark.slow
def test_requests_that_arrive_later_and_are_cancelled(job, tmp_path, encoder_decoder):
    """Also such whose encoder's output is on its way then, and whose blocks others get."""
    paths, theirs = encoder_decoder
    cells = matrix(paths, 2, ["t5"], ["static", "orca"], [((1, 1), 1)]) | sides(paths, 2, ["t5"], (2,))
    cells = {name: (arch, dataclasses.replace(plan, kv_blocks=12)) for name, (arch, plan) in cells.items()}
    todo = [dataclasses.replace(request, arrival_s=0.01 * int(request.id)) for request in requests()]
    gone = {"3", "4", "7", "10", "11"}
    facts = run_cells(job, tmp_path, paths, 2, cells, todo=todo, cancelled=[int(index) for index in gone])
    for name in cells:
        check_times(facts[name])
        assert sorted(r["id"] for r in facts[name]["results"]) == sorted(theirs), name
        reasons = {r["id"]: r["finish_reason"] for r in facts[name]["results"]}
        assert "11" in {r for r, reason in reasons.items() if reason == "cancelled"} <= gone, name
        for result in facts[name]["results"]:
            tokens, _ = theirs[result["id"]]
            assert result["output_ids"] == tokens[: len(result["output_ids"])], name
            assert (len(result["output_ids"]) == len(tokens)) == (reasons[result["id"]] == "length"), name


@pytest.mark.slow
def test_stop_tokens_that_come_back_late_end_their_sequences(job, tmp_path, encoder_decoder):
    paths, theirs = encoder_decoder
    common = Counter(token for tokens, _ in theirs.values() for token in tokens).most_common(3)
    ends = [token for token, _ in common]
    expected = {name: cut_at(tokens, ends) for name, (tokens, _) in theirs.items()}
    assert any(len(tokens) < len(theirs[name][0]) for name, tokens in expected.items())
    cells = matrix(paths, 2, ["t5"], ["hybrid", "rra"], [((1, 1), 1)]) | sides(paths, 2, ["t5"], (1,))
    facts = run_cells(job, tmp_path, paths, 2, cells, eos=ends)
    for name in cells:
        assert {r["id"]: r["output_ids"] for r in facts[name]["results"]} == expected, name


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_whole_matrix(job, tmp_path, encoder_decoder, ranks, policy):
    paths, theirs = encoder_decoder
    cells = matrix(paths, ranks, ["t5"], [policy], LAYOUTS[ranks] + [((1, 1, 2), 1)] * (ranks == 4))
    check(run_cells(job, tmp_path, paths, ranks, cells, timeout=600), cells, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_disaggregated_layouts(job, tmp_path, encoder_decoder, ranks):
    paths, theirs = encoder_decoder
    cells = sides(paths, ranks, ["t5"])
    check(run_cells(job, tmp_path, paths, ranks, cells, timeout=600), cells, theirs)


@pytest.mark.slow
def test_micro_batches_of_any_number(job, tmp_path, encoder_decoder):
    paths, theirs = encoder_decoder
    cells = {}
    for parts, encode_count in itertools.product((1, 2, 3, 5), (None, 1, 4)):
        variables = {"micro_batches": parts, "encode_micro_batches": encode_count}
        for name, (arch, plan) in matrix(paths, 2, ["t5"], POLICIES, [((1, 1), 1)]).items():
            cells[f"{name}-{parts}-{encode_count}"] = (arch, changed(plan, **variables))
    check(run_cells(job, tmp_path, paths, 2, cells, timeout=600), cells, theirs)
