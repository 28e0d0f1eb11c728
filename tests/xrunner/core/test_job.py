"""The engine on the ranks of a job: the tokens of transformers, and the decisions of the simulator."""

import dataclasses
import itertools
import json
from collections import Counter

import pytest

from tests.xcore.small_specs import changed
from tests.xrunner.cells import LAYOUTS, LENGTHS, POLICIES, SIDES, disaggregated, requests, schedule
from tests.xrunner.core import test_architectures as architectures
from xcore.batching import deal
from xcore.document import to_dict
from xcore.policies.waa import most_in_transfer
from xcore.specs.cluster import local_cluster
from xcore.specs.model import ModelSpec
from xcore.specs.workload import LengthDistribution, RequestLengths
from xprofiler.roofline import roofline_profile
from xrunner.core.engine import Engine
from xrunner.models import load_model
from xsimulator.replay.event_simulator import replay


def name_of(arch, policy, degrees, replicas, more=""):
    return f"{arch}-{policy}-{'.'.join(map(str, degrees))}-x{replicas}{more}"


def matrix(directories, ranks, archs, policies=tuple(POLICIES), layouts=None):
    """Cells by name: (architecture, schedule)."""
    cells = {}
    for arch, policy, (degrees, replicas) in itertools.product(archs, policies, layouts or LAYOUTS[ranks]):
        spec = ModelSpec.from_directory(directories[arch])
        cells[name_of(arch, policy, degrees, replicas)] = (
            arch,
            schedule(spec, policy, degrees, replicas=replicas),
        )
    return cells


def run_cells(
    job, tmp_path, directories, ranks, cells, eos=None, timeout=110, todo=None, cancelled=(), program="cells"
):
    """What came of every cell, all of them run by one job. With its second result some requests are cancelled."""
    todo = todo or requests(ignore_eos=eos is None)
    runs = {
        name: {
            "model": str(directories[arch]),
            "schedule": to_dict(plan),
            "requests": [to_dict(request) for request in todo],
            "cancelled": cancelled,
        }
        | ({"eos": eos} if eos else {})
        for name, (arch, plan) in cells.items()
    }
    (tmp_path / "cells.json").write_text(json.dumps(runs))
    done = job(ranks, "-m", "mpi4py", "-m", f"tests.xrunner.{program}", tmp_path, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in cells}


def check_tokens(facts, theirs):
    """Every request once, with transformers' tokens but for near ties."""
    near_ties = 0
    assert sorted(r["id"] for r in facts["results"]) == sorted(theirs)
    for result in facts["results"]:
        tokens, gaps = theirs[result["id"]]
        pairs = zip(result["output_ids"], tokens, strict=True)
        first = next((i for i, (mine, their) in enumerate(pairs) if mine != their), None)
        if first is not None:
            assert gaps[first] < 1e-4, (result["id"], first, gaps[first])
            near_ties += 1
        assert result["finish_reason"] == "length"
    assert near_ties <= 1


def check_times(facts):
    ends = {r["id"]: r["finish_s"] for r in facts["results"]}
    for request in facts["served"]:
        assert 0 <= request["start_s"] < request["first_token_s"] <= request["finish_s"] == ends[str(request["index"])]
    assert facts["seconds"] == max(span["end_s"] for span in facts["spans"])
    by_device = {}
    for span in facts["spans"]:
        by_device.setdefault(span["device"], []).append(span)
    for spans in by_device.values():
        assert all(a["end_s"] <= b["start_s"] for a, b in itertools.pairwise(spans))


def work_of(spans, device):
    return [(s["phase"], s["micro_batch"], s["sequences"], s["tokens"]) for s in spans if s["device"] == device]


def check_decisions(facts, plan):
    """Every stage of every replica did the micro-batches that the replay predicts, in its order; so did its other
    ranks.
    """
    profile = roofline_profile(plan.model.spec, ROOF, "fp32")
    predicted = replay(plan, profile, [RequestLengths(n, m) for n, m in LENGTHS])
    spans = [to_dict(span) for span in predicted.timeline.spans]
    per_replica = sum(len(stage.devices) for stage in plan.stages)
    for replica, stage in itertools.product(range(plan.replicas), plan.stages):
        expected = work_of(spans, replica * per_replica + stage.devices[0])
        assert expected
        for device in stage.devices:
            assert work_of(facts["spans"], replica * per_replica + device) == expected


def rates():
    local = local_cluster()
    device = dataclasses.replace(local.device, flops_s={"fp32": 1e11}, bandwidth_bytes_s=2e10)
    return dataclasses.replace(local, device=device, devices_per_node=4)


ROOF = rates()


def check_order(facts, plan):
    """No micro-batch is computed before its states and tokens are there: no span includes waiting."""
    first, last = plan.stages[0].devices[0], plan.stages[-1].devices[0]
    tokens = {}
    for begin, end in zip(*([s for s in facts["spans"] if s["device"] == d] for d in (first, last)), strict=True):
        assert begin["end_s"] <= end["start_s"] or first == last
        if begin["phase"] == "decode" and plan.policy not in ("static", "hybrid"):  # whose finished rows take no tokens
            assert begin["start_s"] >= tokens.get(begin["micro_batch"], 0.0)
            tokens[begin["micro_batch"]] = end["end_s"]


def check_disaggregated(facts, plan):
    """Batches are as large as they may be and encoded in order, by every stage; every token is decoded once."""
    line = [stage for stage in plan.stages if stage.phase == "encode"]
    per_replica = sum(len(stage.devices) for stage in plan.stages)
    for replica in range(plan.replicas):
        lengths = [LENGTHS[i] for i in deal(LENGTHS, plan.replicas)[replica]]
        device = replica * per_replica + line[0].devices[0]
        batches = work_of(facts["spans"], device)
        assert all(phase == "encode" and count <= plan.control.encode_batch for phase, _, count, _ in batches)
        assert [sum(column) for column in list(zip(*batches, strict=True))[2:]] == [
            len(lengths),
            sum(n for n, _ in lengths),
        ]
        for stage in plan.stages:
            expected = sum(n for n, _ in lengths) if stage.phase == "encode" else sum(m - 1 for _, m in lengths)
            for place in stage.devices:
                assert sum(tokens for *_, tokens in work_of(facts["spans"], replica * per_replica + place)) == expected


def check_sides(facts, cells, theirs):
    for name, (arch, plan) in cells.items():
        try:
            check_tokens(facts[name], theirs[arch])
            check_times(facts[name])
            check_disaggregated(facts[name], plan)
        except AssertionError as error:
            raise AssertionError(name) from error


def sides(directories, ranks, archs, micro_batches=(1, 3), layouts=None, **variables):
    """WAA's cells by name."""
    cells = {}
    for arch, parts, (encode, decode, copies) in itertools.product(archs, micro_batches, layouts or SIDES[ranks]):
        plan = disaggregated(ModelSpec.from_directory(directories[arch]), encode, decode, replicas=copies, **variables)
        name = f"{arch}-{'.'.join(map(str, encode))}-{'.'.join(map(str, decode))}-x{copies}-{parts}"
        cells[name] = (arch, changed(plan, micro_batches=parts))
    return cells


def check_all(facts, cells, theirs):
    for name, (arch, plan) in cells.items():
        try:
            check_tokens(facts[name], theirs[arch])
            check_times(facts[name])
            check_decisions(facts[name], plan)
            check_order(facts[name], plan)
        except AssertionError as error:
            raise AssertionError(name) from error


@pytest.mark.slow
def test_repetition_penalties_over_two_ranks(job, tmp_path, directories):
    """The sampling state is on the last stage's rank, with WAA on both sides': the tokens of one rank alone."""
    todo = requests(temperature=0.9, top_p=0.9, repetition_penalty=1.3)
    model = load_model(directories["llama"])
    expected = {result.id: list(result.output_ids) for result in Engine(model, schedule(model.spec)).run(todo).results}
    cells = matrix(directories, 2, ["llama"], ["rra", "static"], [((1, 1), 1)]) | sides(directories, 2, ["llama"], (2,))
    facts = run_cells(job, tmp_path, directories, 2, cells, todo=todo)
    for name in cells:
        assert {result["id"]: result["output_ids"] for result in facts[name]["results"]} == expected, name


def test_two_ranks_give_the_tokens_of_transformers_and_do_what_the_replay_says(job, tmp_path, directories, theirs):
    cells = matrix(directories, 2, ["llama"], ("static", "chunked", "rra"))
    check_all(run_cells(job, tmp_path, directories, 2, cells), cells, theirs)


@pytest.mark.slow
def test_four_ranks_with_groups_of_different_degrees(job, tmp_path, directories, theirs):
    cells = matrix(directories, 4, ["gpt2"], ["rra", "chunked"], [((2, 1, 1), 1), ((1, 2, 1), 1), ((1, 1), 2)])
    check_all(run_cells(job, tmp_path, directories, 4, cells), cells, theirs)


@pytest.mark.slow
def test_disaggregated_on_two_ranks(job, tmp_path, directories, theirs):
    """With room for few residents, too, where encoding waits for decoding to free blocks that KV transfers go to."""
    cells = sides(directories, 2, ["llama"])
    cells |= {f"full-{name}": cell for name, cell in sides(directories, 2, ["gpt2"], kv_blocks=9).items()}
    check_sides(run_cells(job, tmp_path, directories, 2, cells), cells, theirs)


def test_an_adjusted_batch_of_more_than_b_e_prompts_on_two_ranks(job, tmp_path, directories):
    """While few sequences decode, 11 prompts are encoded for a B_E of 10. Each nearly fills the context."""
    model = load_model(directories["llama"])
    todo = requests(lengths=[(model.spec.context - 3, 3)] * 24)
    plan = schedule(model.spec, "orca")
    expected = {result.id: list(result.output_ids) for result in Engine(model, plan).run(todo).results}
    lengths = dataclasses.replace(plan.workload, input=LengthDistribution.fixed(model.spec.context - 3))
    many = {"encode_batch": 10, "decode_batch": 40, "kv_blocks": 24 * model.spec.context, "adjust": 0.05}
    cells = {"waa": ("llama", dataclasses.replace(disaggregated(model.spec, (1,), (1,), **many), workload=lengths))}
    facts = run_cells(job, tmp_path, directories, 2, cells, todo=todo)["waa"]
    assert {result["id"]: result["output_ids"] for result in facts["results"]} == expected
    assert max(span["sequences"] for span in facts["spans"] if span["phase"] == "encode") == 11


@pytest.mark.slow
def test_disaggregated_with_layers_and_heads_split_otherwise(job, tmp_path, directories, theirs):
    layouts = [((2,), (1, 1), 1), ((1, 1), (2,), 1), ((1,), (1,), 2)]
    cells = sides(directories, 4, ["gpt2"], (2,), layouts)
    check_sides(run_cells(job, tmp_path, directories, 4, cells), cells, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "ranks"), [("llama", 3), ("llama", 4), ("gpt2", 4)])
def test_all_disaggregated_layouts(job, tmp_path, directories, theirs, arch, ranks):
    cells = sides(directories, ranks, [arch])
    check_sides(run_cells(job, tmp_path, directories, ranks, cells, timeout=600), cells, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "ranks"), [("llama", 2), ("gpt2", 2), ("llama", 4), ("gpt2", 4)])
def test_the_whole_matrix(job, tmp_path, directories, theirs, arch, ranks):
    cells = matrix(directories, ranks, [arch])
    check_all(run_cells(job, tmp_path, directories, ranks, cells, timeout=600), cells, theirs)


@pytest.mark.slow
def test_micro_batches_of_any_number(job, tmp_path, directories, theirs):
    spec = ModelSpec.from_directory(directories["llama"])
    cells = {}
    for policy, parts, encode_count in itertools.product(POLICIES, (1, 2, 3, 5), (None, 1, 4)):
        plan = schedule(spec, policy, (1, 1), micro_batches=parts, encode_micro_batches=encode_count)
        cells[name_of("llama", policy, (1, 1), 1, f"-{parts}-{encode_count}")] = ("llama", plan)
    check_all(run_cells(job, tmp_path, directories, 2, cells, timeout=600), cells, theirs)


@pytest.mark.slow
def test_every_architecture_in_stages_in_shards_and_disaggregated(job, tmp_path):
    models = {name: architectures.make(tmp_path, name) for name in architectures.CONFIGS}
    cells, paths = {}, {name: path for name, (path, _, _) in models.items()}
    for name, path in paths.items():
        spec = ModelSpec.from_directory(path)
        cells[f"{name}-stages"] = (name, schedule(spec, "rra" if spec.encoder_layers else "chunked", (1, 1)))
        cells[f"{name}-shards"] = (name, schedule(spec, "orca", (2,)))
        cells[f"{name}-disaggregated"] = (name, disaggregated(spec, (1,), (1,)))
    todo = models["llama"][1]
    facts = run_cells(job, tmp_path, paths, 2, cells, timeout=600, todo=todo)
    for cell, (name, _) in cells.items():
        expected = {request.id: pair for request, pair in zip(todo, models[name][2], strict=True)}
        check_tokens(facts[cell], expected)


@pytest.mark.slow
def test_requests_that_arrive_later_and_are_cancelled(job, tmp_path, directories, theirs):
    cells = matrix(directories, 2, ["llama"], ["static", "rra"], [((1, 1), 1)]) | sides(directories, 2, ["llama"], (2,))
    todo = [dataclasses.replace(request, arrival_s=0.01 * int(request.id)) for request in requests()]
    facts = run_cells(job, tmp_path, directories, 2, cells, todo=todo, cancelled=(3, 7, 10, 11))
    for name in cells:
        check_times(facts[name])
        assert sorted(r["id"] for r in facts[name]["results"]) == sorted(request.id for request in todo), name
        reasons = {r["id"]: r["finish_reason"] for r in facts[name]["results"]}
        assert {r for r, reason in reasons.items() if reason == "cancelled"} <= {"3", "7", "10", "11"}
        assert reasons["11"] == "cancelled", name  # it arrives last, and hadn't ended by then
        for result in facts[name]["results"]:
            tokens, _ = theirs["llama"][result["id"]]
            assert result["output_ids"] == tokens[: len(result["output_ids"])], name
            assert result["start_s"] is None or result["start_s"] >= result["arrival_s"]
            assert (len(result["output_ids"]) == len(tokens)) == (reasons[result["id"]] == "length"), name


@pytest.mark.slow
def test_a_run_leaves_no_message_for_the_next(job, tmp_path, directories):
    """Requests of one token have nothing to transfer: the driver is through when their tokens are there."""
    todo = requests([(9, 1)] * 4)
    facts = run_cells(job, tmp_path, directories, 2, sides(directories, 2, ["llama"]), todo=todo, program="left_over")
    assert all(len(cell["results"]) == 4 for cell in facts.values())


@pytest.mark.slow
def test_batches_do_not_pile_up_before_a_slow_kv_transfer(job, tmp_path, directories):
    """Each has buffers on both sides; the cache would hold them all."""
    plan = disaggregated(ModelSpec.from_directory(directories["llama"]), (1,), (1,), encode_batch=1, kv_blocks=200)
    todo = requests([(9, 12)] * 20)
    facts = run_cells(job, tmp_path, directories, 2, {"slow": ("llama", plan)}, todo=todo, program="slow_kv_transfer")
    assert len(facts["slow"]["results"]) == 20
    assert int((tmp_path / "waited.txt").read_text()) == most_in_transfer(1)


def cut_at(tokens, ends):
    """The tokens up to the first that ends a text."""
    return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2])
def test_stop_tokens_that_come_back_late_end_their_sequences(job, tmp_path, directories, theirs, ranks):
    counts = Counter(token for tokens, _ in theirs["llama"].values() for token in tokens)
    ends = [token for token, _ in counts.most_common(3)]
    cells = matrix(directories, ranks, ["llama"], layouts=[((1, 1), 1)]) | sides(directories, ranks, ["llama"])
    facts = run_cells(job, tmp_path, directories, ranks, cells, eos=ends)
    expected = {name: cut_at(tokens, ends) for name, (tokens, _) in theirs["llama"].items()}
    assert any(len(tokens) < len(theirs["llama"][name][0]) for name, tokens in expected.items())
    for name in cells:
        assert {r["id"]: r["output_ids"] for r in facts[name]["results"]} == expected, name
        stopped = {r["id"] for r in facts[name]["results"] if r["finish_reason"] == "stop"}
        assert stopped == {r for r, tokens in expected.items() if tokens[-1] in ends}, name
