"""Hermes' evaluation: what its generator states, and the order of the figures where queues are long, on the built-in
sizes; the published samples where they are at hand."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from exegpt.reproduction import hermes, hermes_scale, hermes_sections
from exegpt.reproduction import hermes_arrivals as arrivals
from exegpt.reproduction import hermes_policy_time as policy_time
from exegpt.reproduction import hermes_workload as drawing
from tests.exegpt.cli.conftest import run_command
from tests.public_data import needs_data
from tests.xmulti.applications import step_by_step
from xcore.applications.demand import ApplicationDemand
from xcore.errors import InputError

SEEDS = (0, 1)


@pytest.fixture(scope="module")
def graphs():
    return drawing.built_in()


@pytest.fixture(scope="module")
def models(graphs):
    learned = drawing.learn_graphs(graphs, 1)
    return {name: ApplicationDemand(graph, hermes.RATES) for name, graph in learned.items()}


def test_the_mix_is_the_published_one(graphs):
    submissions = drawing.draw_submissions(graphs, 300, 600.0, 0)
    names = [each.name for each in submissions]
    assert sum(drawing.MIX.values()) == 100
    assert {name: names.count(name) for name in drawing.MIX} == {n: 3 * share for n, share in drawing.MIX.items()}
    arrivals = [each.arrival_s for each in submissions]
    assert arrivals == sorted(arrivals) and arrivals[0] >= 0 and arrivals[-1] <= 600


def test_arrivals_come_in_bursts(graphs):
    """Poisson arrivals would have counts of variance equal to their mean, 10; these have about its square."""
    counts = [
        np.histogram([s.arrival_s for s in drawing.draw_submissions(graphs, 300, 30.0, seed)], 30, (0, 30))[0].var()
        for seed in range(5)
    ]
    assert 40 < np.mean(counts) < 250


def test_runs_are_correlated_as_stated(graphs):
    """Two variables of a run: 0.8 on the normal scale; a loop's length is not among them."""
    random = np.random.default_rng(0)
    graph = next(each for each in graphs if each.application == "factool_kbqa")
    runs = [drawing.draw_calls(graph, random) for _ in range(800)]
    query, verify = ([run[at] for run in runs] for at in (1, 3))
    rho = np.corrcoef([c.output_tokens for c in query], [c.output_tokens for c in verify])[0, 1]
    assert rho == pytest.approx(drawing.CORRELATION, abs=0.07)
    assert {call.unit for run in runs for call in run} == {"claims", "query", "search", "verify"}


@pytest.mark.slow
def test_the_orders_stand_as_in_the_paper_where_queues_are_long(graphs, models, monkeypatch):
    """At 1x on the small batch: Hermes first, and its reductions within 20 points of the paper's."""
    monkeypatch.setattr(hermes, "LOADS", {"1x": hermes.LOADS["1x"]})
    monkeypatch.setattr(hermes, "ENGINES", {"8 at once": hermes.ENGINES["8 at once"]})
    rows = {row.order: row for row in hermes.completions(graphs, models, SEEDS)}
    assert min(rows.values(), key=lambda row: row.mean_s).order == "Hermes"
    for order in hermes.PAPER:
        assert rows[order].mean_reduction < -0.3 and rows[order].p95_reduction < 0


def test_gains_vanish_where_nobody_waits(graphs, models, monkeypatch):
    monkeypatch.setattr(hermes, "LOADS", {"idle": 300.0})
    monkeypatch.setattr(hermes, "ENGINES", {"256 at once": hermes.LIMITS})
    rows = hermes.completions(graphs, models, SEEDS[:1])
    assert all(abs(row.mean_reduction) < 0.02 and row.over_alone < 1.25 for row in rows)


def test_knobs_fall_and_the_printed_equation_rises(models):
    rows = [row for row in hermes.knobs(models) if row.backend == "dnn"]
    for name in ("saved_s", "wasted_s"):
        values = [getattr(row, name) for row in rows]
        literal = [getattr(row, f"literal_{name}") for row in rows]
        assert values == sorted(values, reverse=True) and literal == sorted(literal)
        assert values[0] > values[-1] and literal[0] < literal[-1]


def test_what_was_seen_tells_of_what_remains(graphs, models):
    known = hermes.knowledge(graphs, models, 0)
    assert known.refined_error_s < known.error_s
    assert 0.7 < known.ordered_pairs < 1 and 0 < known.announceable < 0.5


def test_figures_are_laid_beside_the_papers(graphs):
    result = hermes.Hermes(
        "a source",
        (hermes.OrderResult("8 at once", "1x", "vLLM", 256.0, 865.0, 9.0, -0.7, -0.69, 7 * (3.0,)),),
        (hermes.InTime("8 at once", "EDF", 0.25, (0.1, 0.2, 0.3)),),
        (hermes.Ablation("8 at once", "no refinement", 100.0, 0.05),),
        (hermes.Spread(0.6, 50.0, {"no refinement": 0.1, "nor Gittins": 0.2, "oracle": -0.3}),),
        (hermes.RealArrivals("Azure, code", 100.0, 200.0, -0.5),),
        (hermes.LargerModel("no refinement", 90.0, 0.1),),
        (hermes.Bucketing(10, 0.5, 80.0),),
        (
            hermes.Kind("a", 0.25, 10.0, 0.5, 11.0, 9.0, {"Hermes": 20.0, "oracle": 16.0}),
            hermes.Kind("b", 0.75, 10.0, 0.5, 11.0, 9.0, {"Hermes": 20.0, "oracle": 16.0}),
        ),
        (hermes.Cached("KV, 8 GB", "lru", 0.5, 64.0, 0.1, -0.1),),
        (hermes.Knob("docker", 0.5, 1.0, 2.0, 3.0, 4.0),),
        hermes.Knowledge(0.8, 20.0, 19.0, 0.14),
        (hermes.PolicyTime(20.0, 31.5, 0.25),),
        (hermes.ScaleResult("3x", "vLLM", 100.0, 200.0, -0.2, -0.1, 7 * (5.0,)),),
    )
    sections = hermes_sections.sections(result)
    assert len(sections) == 13
    (kinds,) = [section for section in sections if section.title.startswith("Mean completion time by application")]
    assert kinds.rows[0] == ("a", "25.0 %", "10", "0.50", "11", "9", "20", "16")
    assert kinds.notes == ("The oracle's savings come from b 75% and a 25%.",)
    assert all(len(row) == len(section.columns) for section in sections for row in section.rows)
    completion, deadlines, ablation = sections[0].rows[0], sections[3].rows[0], sections[4].rows[0]
    assert sections[1].rows[0] == ("3x", "vLLM", "100", "200", "-20.0%", "-58.5%", "-10.0%", "-62.2%")
    assert [row[:4] for row in sections[2].rows] == [("8 at once", "1x", "vLLM", "3"), ("two 70B", "3x", "vLLM", "5")]
    assert "-77.0%" in completion and "-70.0%" in completion
    assert deadlines[2:] == ("25.0 %", "10.0 %", "20.0 %", "30.0 %")
    assert ablation[-2:] == ("+5.0%", "+15.3%")
    assert sections[6].rows[0] == ("Azure, code", "100", "200", "-50.0%")
    assert sections[5].rows[0] == ("0.6", "50", "+10.0%", "+20.0%", "-30.0%")


@pytest.mark.slow
def test_more_buckets_change_little(graphs, models):
    rows = {row.buckets: row for row in hermes.bucketings(graphs, models, (0,))}
    assert set(rows) == {5, 10, 20, 40, 80}
    assert rows[80].mean_s == pytest.approx(rows[10].mean_s, rel=0.1)


def test_a_spread_multiplies_all_outputs_of_a_run_by_one_factor(graphs):
    """The factor's mean is 1. The logarithms of runs' outputs vary by the spread in addition to their own variance."""
    graph = next(each for each in graphs if each.application == "factool_kbqa")
    totals = {}
    for spread in (0.0, 0.9):
        random = np.random.default_rng(1)
        runs = [drawing.draw_calls(graph, random, spread) for _ in range(3000)]
        totals[spread] = np.array([sum(call.output_tokens for call in run) for run in runs])
    logs = {spread: np.log(outputs).var() for spread, outputs in totals.items()}
    assert logs[0.9] - logs[0.0] == pytest.approx(0.81, rel=0.1)
    assert totals[0.9].mean() == pytest.approx(totals[0.0].mean(), rel=0.1)


def test_real_arrivals_are_consecutive_ones_of_a_trace():
    trace = np.cumsum(np.random.default_rng(3).pareto(1.5, 500))
    own = arrivals.consecutive(trace, 60, 90.0, 1)
    assert own[0] == 0 and own[-1] == pytest.approx(90.0) and own == sorted(own)
    shapes = [np.diff(trace[i : i + 60]) / np.ptp(trace[i : i + 60]) for i in range(441)]
    assert any(np.allclose(np.diff(own) / 90.0, shape) for shape in shapes)


@pytest.mark.slow
def test_hermes_gains_at_even_arrivals_too(graphs, models):
    rows = hermes.real_arrivals(graphs, models, (0,), {"a trace": np.arange(400.0)})
    assert [row.arrivals for row in rows] == ["exponential bursts", "a trace"]
    assert all(row.reduction < 0 for row in rows) and rows[1].hermes_s < rows[0].hermes_s, "without bursts"


def test_all_published_samples_are_used():
    """The fitted models count: gaps before an LLM unit are the seconds of the backend before it."""
    source, graphs = drawing.find_graphs(needs_data("hermes", "pdgraphs.json"))
    assert "task_models_skewnorm.json" in source
    units = {(graph.application, step.name): step for graph in graphs for step in graph.units}
    counts = {name: len(step.input_tokens) for name, step in units.items() if step.backend == "llm"}
    assert min(counts.values()) == 23 and max(counts.values()) == 223 and counts["react_alfw", "thought"] == 100
    planned = units["hugginggpt", "dnn_execution"].seconds
    assert len(planned) == 23 and planned[0] == pytest.approx(41.2, abs=0.1)
    ends = units["react_alfw", "thought"].next_units
    assert ends.count("end") / len(ends) == pytest.approx(1 - 0.9363, abs=1e-3)
    assert units["got_docmerge", "score1"].next_units.count("aggregate") == 5, "repeated twice: as in the graph"
    assert units["factool_code", "code_execution"].seconds == tuple(
        next(
            step.seconds
            for graph in drawing.read_demand_graphs(needs_data("hermes", "pdgraphs.json"))
            for step in graph.units
            if (graph.application, step.name) == ("factool_code", "code_execution")
        )
    ), "nothing follows it"


def test_where_the_samples_come_from_is_said(monkeypatch, tmp_path):
    monkeypatch.delenv("EXEGPT_DATA", raising=False)
    source, graphs = drawing.find_graphs()
    assert "built-in" in source and {graph.application for graph in graphs} == set(drawing.MIX)
    monkeypatch.setenv("EXEGPT_DATA", str(tmp_path))  # which has none
    assert drawing.find_graphs()[0] == source
    path = tmp_path / "one.json"
    unit = {"type": "llm", "next": ["end"], "input_len": [1], "output_len": [1], "parallelism": [1]}
    path.write_text(json.dumps({"mine": {"start": {"type": "start", "next": ["a"]}, "end": {}, "a": unit}}))
    with pytest.raises(InputError, match="has no demand graph of code_feedback"):
        drawing.find_graphs(path)
    log = tmp_path / "calls.jsonl"
    call = {"application": "mine", "run": 1, "unit": "a", "input_tokens": 1, "output_tokens": 1, "next": "end"}
    log.write_text(json.dumps(call))
    with pytest.raises(InputError, match="has no demand graph of code_feedback"):
        drawing.find_graphs(log)


@pytest.mark.parametrize(
    ("following", "sentence"),
    [("a", "always repeats the cycle a → a"), ("b", "goes from 'a' to 'b', which is not one of its units")],
)
def test_the_command_refuses_a_graph_without_end_in_one_sentence(tmp_path, following, sentence):
    path = tmp_path / "graphs.json"
    unit = {"type": "llm", "next": [following], "input_len": [1], "output_len": [1], "parallelism": [1]}
    path.write_text(json.dumps({"mine": {"start": {"type": "start", "next": ["a"]}, "end": {}, "a": unit}}))
    done = run_command("reproduce", "hermes", "--graphs", str(path))
    assert done.code == 2 and sentence in done.err
    assert "Traceback" not in done.err and done.err.strip().count("\n") == 0


def test_kinds_are_all_applications_of_the_ablation(graphs, models, monkeypatch):
    monkeypatch.setattr(hermes, "APPLICATIONS", 100)
    rows = hermes.kinds(graphs, models, SEEDS[:1])
    (means,) = [{r.name: r.mean_s for r in hermes.ablations(graphs, models, SEEDS[:1]) if r.engine == "8 at once"}]
    assert sum(row.share for row in rows) == pytest.approx(1)
    for order, mean_s in means.items():
        assert sum(row.share * row.mean_s[order] for row in rows) == pytest.approx(mean_s)


def test_running_calls_have_no_more_adapters_than_the_paper(graphs, models, monkeypatch):
    """The paper's LLM runs ten adapters at once of the twenty that it holds: the others are warm for calls to come."""
    seen = []

    def simulate(workload, order, limits, estimates, cache, *more):
        seen.append((cache.capacity, cache.active, cache.contexts))
        return hermes_simulate(workload, order, limits, estimates, cache, *more)

    hermes_simulate = hermes.simulate
    monkeypatch.setattr(hermes, "simulate", simulate)
    workloads = [drawing.draw_submissions(graphs, 60, 90.0, 0, adapters=12)]
    rows = hermes._cached("LoRA, 6 slots", workloads, models, 6, lambda _: 0.5, False)
    assert {each[1] for each in seen} == {hermes.ACTIVE_ADAPTERS} and len(rows) == 3
    hermes._cached("KV", workloads, models, 1e9, lambda _: 0.5, True)
    assert seen[-1] == (1e9, None, True)


@pytest.mark.slow
def test_most_waiting_is_before_anything_was_seen_of_a_run():
    """What the log gives as the reason why refinement and Gittins bring little: where 8 run at once nine tenths of all
    waiting are before first calls, and there kinds have the same order by their means as by Gittins.
    """
    graphs = drawing.read_demand_graphs(needs_data("hermes", "pdgraphs.json"))
    learned = drawing.learn_graphs(graphs, 1_000_000)
    models = {name: ApplicationDemand(graph, hermes.RATES) for name, graph in learned.items()}
    workload = drawing.draw_submissions(graphs, 300, 600.0, 0)
    order, estimates = hermes.application_gittins(), hermes.DemandEstimates(models)
    first_s, later_s = step_by_step.waited_s(workload, order, hermes.ENGINES["8 at once"], estimates)
    assert 0.85 < first_s / (first_s + later_s) < 0.95
    rows = hermes.kinds(graphs, models, (0,))
    pairs = list(itertools.combinations(rows, 2))
    differing = [
        (a.application, b.application) for a, b in pairs if (a.expected_s < b.expected_s) != (a.rank_s < b.rank_s)
    ]
    assert differing == []


@pytest.mark.slow
def test_preemption_is_not_what_the_ablations_lack():
    """The repository's script of the ablations lets requests be swapped out. Even at no cost that moves the figures by
    a few points, on either engine.
    """
    graphs = drawing.read_demand_graphs(needs_data("hermes", "pdgraphs.json"))
    learned = drawing.learn_graphs(graphs, 1_000_000)
    models = {name: ApplicationDemand(graph, hermes.RATES) for name, graph in learned.items()}
    workload = drawing.draw_submissions(graphs, 300, 600.0, 0)
    refined, prior = hermes.DemandEstimates(models), hermes.DemandEstimates(models, refine=False)
    for engine, most in (("8 at once", 0.05), ("256 at once", 0.08)):
        over = []
        for preempts in (False, True):
            means = [
                np.mean(step_by_step.completion_s(workload, order, hermes.ENGINES[engine], known, preempts))
                for order, known in (
                    (hermes.application_gittins(), refined),
                    (hermes.application_gittins(), prior),
                    (hermes.LowestMean(), prior),
                    (hermes.Oracle(hermes.RATES), None),
                )
            ]
            over.append([mean_s / means[0] - 1 for mean_s in means])
        assert over[1] == pytest.approx(over[0], abs=most)


@pytest.mark.slow
def test_all_of_it_on_the_published_samples():
    """What the log reports, on two seeds: signs where queues are long, hits of caches, a quick decision."""
    result = hermes.reproduce(graphs=needs_data("hermes", "pdgraphs.json"), seeds=2)
    assert "pdgraphs.json" in result.source
    crowded = {r.order: r for r in result.completions if (r.engine, r.load) == ("8 at once", "1x")}
    for order, (mean, p95) in hermes.PAPER.items():
        assert crowded[order].mean_reduction == pytest.approx(mean, abs=0.2)
        assert crowded[order].p95_reduction == pytest.approx(p95, abs=0.2)
    kept = {r.order: r.all for r in result.in_time if r.engine == "8 at once"}
    assert kept["Hermes, least slack"] > 1.5 * kept["EDF"]
    hits = {(r.cache, r.policy): r.hits for r in result.caches}
    for gigabytes in hermes.CONTEXT_GB:
        lru, epwq, prewarm = (hits[f"KV, {gigabytes} GB", policy] for policy in ("lru", "epwq", "prewarm"))
        assert lru < epwq < prewarm
    lru, epwq, prewarm = (hits["LoRA, 20 slots", policy] for policy in ("lru", "epwq", "prewarm"))
    assert 1.1 * lru < epwq < prewarm


def test_the_larger_setting_has_its_weights_and_cache(graphs):
    """By hand: 70.6 billion parameters in 2 bytes leave 37 of 72 GB on each of four GPUs."""
    limits = hermes_scale.limits()
    assert limits.kv_bytes_per_token == 2 * 80 * 8 * 128 * 2
    assert 0.8 < limits.kv_tokens * limits.kv_bytes_per_token / (4 * 80e9 * 0.9 - 2 * 70.55e9) < 1.25
    assert limits.rates.decode_s == pytest.approx(
        float(limits.cost.decode_seconds(256, np.array([1000.0]), 1.0)[0]) / 256
    )
    rows = {row.order: row for row in hermes_scale.scale(graphs, 0, 40, ("3x",))}
    assert {*rows} == {"Hermes", "Hermes, seconds alone", "vLLM", "Parrot", "VTC"}
    for row in rows.values():
        assert list(row.quantiles_s) == sorted(row.quantiles_s) and row.quantiles_s[0] < row.mean_s
        assert row.quantiles_s[5] == pytest.approx(row.p95_s)
        assert row.mean_reduction == pytest.approx(rows["Hermes"].mean_s / row.mean_s - 1)


def test_every_application_goes_to_one_of_the_two(graphs):
    workload = drawing.draw_submissions(graphs, 31, 60.0, 0)
    first, second = hermes_scale._dealt(workload, by_kind=True)
    assert sorted([*first, *second], key=lambda each: each.index) == [
        replace(each, client=each.name) for each in workload
    ]
    assert len(first) - len(second) == 1


def test_the_policys_time_is_for_the_calls_that_wait(graphs, models):
    """A slow arrival of applications leaves few calls waiting; more calls take longer to order."""
    slow, fast = policy_time.policy_times(graphs, models, 0, (600.0, 10.0))
    assert (slow.rate_per_minute, fast.rate_per_minute) == (0.5, 30.0)
    assert 1 <= slow.waiting < 5 < fast.waiting < 300 and 0 < slow.ms < fast.ms
