"""SeaLLM's evaluation: what its generator states, its systems' rooms and placements, and what is counted."""

import json
from dataclasses import replace

import numpy as np
import pytest

from exegpt.cli import main
from exegpt.reproduction import seallm, seallm_arrivals, seallm_replacement, seallm_systems, seallm_workload
from exegpt.reproduction.seallm import ScenarioResult, SeaLLM, SeaLLMScenario, sections
from exegpt.reproduction.seallm_arrivals import RealComparison, RealLoad
from exegpt.reproduction.seallm_placement import PlacementTime, placement_times
from exegpt.reproduction.seallm_replacement import Replacements, matched, popularities
from exegpt.reproduction.seallm_systems import (
    OURS,
    Figures,
    dedicated_engines,
    even_split,
    figures_of,
    have_room,
    replay_of,
)
from exegpt.reproduction.seallm_workload import SETS, ServiceArrays, Traffic, joined, k_means, services, traffic_of
from xcore.specs.workload import RequestLengths
from xmulti.stages.two_stage import Placed, ServiceGroup

FIGURES = Figures(100, 2.0, 0.5, 0.3, 0.95, 10.0, 1.0, 0.02, 0.5, 0, 0, (0.2, 0.5, 0.95, 1.0, 1.0), "32 × 1")


def service_of(llm):
    return next(service for service in services() if service.llm == llm)


def test_services_are_of_four_llms_within_their_contexts():
    assert sorted(service.llm for service in services()) == sorted(4 * [*seallm_workload.LLMS])
    for service in services():
        assert (service.inputs + service.outputs <= service.model.context).all() and (service.outputs >= 1).all()
    shares = sorted((service.popularity for service in services()), reverse=True)
    assert sum(shares) == pytest.approx(1) and shares[0] / shares[7] == pytest.approx(8**0.9)


def test_lengths_have_the_papers_means():
    draws = np.random.default_rng(1)
    for means in SETS.values():
        drawn = seallm_workload._lognormal(draws, means)
        assert drawn.mean(axis=0) == pytest.approx(means, rel=0.1)


def test_clusters_that_are_far_apart_are_found():
    draws = np.random.default_rng(0)
    points = np.concatenate([centre + draws.normal(size=(40, 2)) for centre in ([0, 0], [90, 0], [0, 90])])
    found = k_means(points, 3, draws)
    assert [len(set(found[first : first + 40])) for first in (0, 40, 80)] == [1, 1, 1] and len(set(found)) == 3


def test_gaps_between_a_services_arrivals_have_the_variation_that_is_asked_for():
    popular = max(services(), key=lambda service: service.popularity)
    (asked,) = traffic_of(Traffic(10.0, 4.0, 10_000.0, 3), [popular]).values()
    gaps = np.diff(asked.arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(4.0, rel=0.12)
    assert len(gaps) == pytest.approx(100_000 * popular.popularity, rel=0.12)


def test_runs_come_together_and_noise_is_not_foreseen():
    traffic = Traffic(10.0, 1.0, 600.0, 3, run=4)
    for asked in traffic_of(traffic, services()).values():
        assert (asked.arrival_s.reshape(-1, 4) == asked.arrival_s[::4, None]).all()
        assert (asked.outputs == asked.expected).all()
    noisy = traffic_of(replace(traffic, noise=4.0), services())
    for name, asked in traffic_of(traffic, services()).items():
        other = noisy[name]
        assert (other.expected == asked.expected).all() and (other.arrival_s == asked.arrival_s).all()
        assert (other.outputs != asked.outputs).any() and (other.outputs >= 1).all()
        assert [known.output_tokens for known in other.requests.hints] == [*asked.expected]


def test_requests_are_cut_and_joined_without_loss():
    asked = traffic_of(Traffic(10.0, 1.0, 60.0, 3), services())["s00"]
    early = asked.arrival_s < 20
    whole = joined([asked.only(early), asked.only(~early).later(-20.0).later(20.0)])
    assert np.allclose(whole.arrival_s, asked.arrival_s) and np.allclose(whole.alone_s, asked.alone_s)
    assert [r.output for r in whole.requests.lengths] == [r.output for r in asked.requests.lengths]


def test_a_request_that_is_alone_takes_its_time_alone():
    """L̂'s closed form beside the engine of a service that has its devices alone."""
    for service in (service_of("llama-2-7b"), service_of("opt-6.7b")):
        asked = ServiceArrays(service, np.array([1.0]), *(np.array([tokens]) for tokens in (800.0, 60.0, 60.0)))
        (engine,) = [e for e in dedicated_engines(services(), 2 * 4) if e.loads[0].name == service.name]
        on_one = replace(engine, devices=(0,), loads=(seallm_systems._load(service, 1, engine.loads[0].pool),))
        figures = figures_of({service.name: asked}, replay_of({service.name: asked}, [on_one]), [on_one])
        assert figures.normalised * service.mean_s == pytest.approx(asked.alone_s[0], rel=0.02)
        assert figures.in_time == 1 and figures.waiting == 0 and figures.groups == "1 × 1"


def test_services_alone_meet_nobody():
    """Two services in a group of one device, each as alone there as in a group of its own; together they wait."""
    pair = [service_of("llama-2-7b"), service_of("opt-6.7b")]
    asked = {
        service.name: ServiceArrays(
            service, np.array([1.0, 1.0]), *(np.array([800.0, 90.0]), *2 * (np.array([60.0, 9.0]),))
        )
        for service in pair
    }
    history = seallm_systems.History(tuple(pair), asked, 1, 1.0)
    groups = [ServiceGroup((0,), tuple(sorted(service.name for service in pair)))]
    rule = seallm_systems.RULES[OURS]
    engines = seallm_systems.merged_engines(groups, history.by_name, rule)
    alone = figures_of(asked, seallm_systems.alone_replay(asked, groups, history, rule), engines)
    together = figures_of(asked, replay_of(asked, engines), engines)
    assert alone.waiting == 0 < together.waiting and alone.normalised < together.normalised
    nobody = {service.name: replace(asked[service.name]).only(slice(0)) for service in pair}
    for service in pair:
        of_one = nobody | {service.name: asked[service.name]}
        (engine,) = seallm_systems.merged_engines(groups, history.by_name, rule)
        own = replay_of(of_one, [engine]).served[service.name]
        assert [s.finish_s for s in own] == [
            s.finish_s for s in seallm_systems.alone_replay(asked, groups, history, rule).served[service.name]
        ]


def test_an_even_split_uses_what_there_is_and_crosses_no_node():
    sizes = even_split(services(), 4)
    assert sum(sizes.values()) == 32 and min(sizes.values()) >= 1
    assert all(sizes[service.name] >= service.least for service in services())
    devices = [engine.devices for engine in dedicated_engines(services(), 4)]
    assert sorted(device for of_engine in devices for device in of_engine) == list(range(32))
    assert all(of_engine[0] // 8 == of_engine[-1] // 8 for of_engine in devices)
    assert even_split(services(), 1) == {} and dedicated_engines(services(), 1) is None


def test_who_has_room_beside_whom():
    small, middle, large = (service_of(f"llama-2-{size}b") for size in (7, 13, 70))
    assert have_room(1, [small, middle]) and not have_room(1, [large])
    assert not have_room(2, [large, large]) and have_room(8, [large, large])


def test_popularities_move_and_none_is_lost():
    phases = [[service.popularity for service in phase] for phase in popularities()]
    assert all(sorted(phase) == sorted(phases[0]) for phase in phases)
    assert len({tuple(phase) for phase in phases}) == seallm_replacement.PHASES


def test_groups_that_stay_keep_their_devices():
    before = [ServiceGroup((0,), ("a", "b")), ServiceGroup((1,), ("c", "d")), ServiceGroup((2, 3), ("e",))]
    wanted = [ServiceGroup((0,), ("c", "f")), ServiceGroup((1,), ("a", "b")), ServiceGroup((2, 3), ("e", "f"))]
    assert matched(wanted, before) == (
        ServiceGroup((1,), ("c", "f")),
        ServiceGroup((0,), ("a", "b")),
        ServiceGroup((2, 3), ("e", "f")),
    )
    other = [ServiceGroup((0, 1), ("a",)), ServiceGroup((2, 3), ("b",))]
    assert matched(other, before) == tuple(other)


@pytest.mark.parametrize("restart", [False, True])
def test_replaced_engines_serve_every_request(monkeypatch, restart):
    """Two placements in turns, in short phases: intervals follow the rule, and what moves has its price."""
    monkeypatch.setattr(seallm_replacement, "PHASES", 2)
    monkeypatch.setattr(seallm_replacement, "PHASE_S", 50.0)
    monkeypatch.setattr(seallm_replacement, "FIRST_S", 40.0)
    by_size = [service.name for service in sorted(services(), key=lambda service: -service.model.parameters)]
    large, small = by_size[:8], by_size[8:]
    turns = []
    for shift in (0, 1):
        pairs = [tuple(sorted((large[n], small[(n + shift) % 8]))) for n in range(8)]
        groups = tuple(ServiceGroup(tuple(range(4 * n, 4 * n + 4)), pair) for n, pair in enumerate(pairs))
        turns.append(Placed(4, groups, 0.9, 2.0))
    in_turn = iter(4 * turns)
    monkeypatch.setattr(seallm_replacement, "_placed", lambda history: next(in_turn))
    found = seallm_replacement.adaptive(seallm_replacement.drift(), restart)
    assert found.figures.requests == sum(len(own.inputs) for own in seallm_replacement.changing_traffic().values())
    assert found.intervals_s[0] == 40.0 and len(found.intervals_s) == len(found.errors) == 2
    assert found.intervals_s[1] == pytest.approx(40.0 * (0.9 if found.errors[0] > 0.1 else 1.1))
    assert found.moved == 16


def test_a_scenario_is_measured_under_all_systems(monkeypatch):
    for name, value in (("REPLAYED", 200), ("REPLAYED_S", 10.0), ("PAST", 100), ("PAST_S", 5.0)):
        monkeypatch.setattr(seallm, name, value)
    measured = seallm.measure(SeaLLMScenario("quick", 4.0, 1.0, ablated=True))
    assert {*measured.systems} == {"vLLM", "AlpaServe", "MuxServe", *seallm_systems.RULES}
    assert len({own.requests for own in measured.systems.values() if own}) == 1
    for own in filter(None, measured.systems.values()):
        assert own.waiting >= 0 and own.first > 0 and own.waiting + own.first < own.normalised
        assert list(own.in_time_at) == sorted(own.in_time_at) and own.busy > 0
    assert measured.systems[OURS].normalised < 3 and measured.systems[OURS].in_time > 0.9  # at a light load


def trace(count):
    """Two kinds of requests, of which the second comes in the second half only; 10 requests/s."""
    draws = np.random.default_rng(2)
    kinds = np.where(np.arange(count) < count / 2, 0, draws.integers(2, size=count))
    sizes = np.exp(draws.normal(0, 0.2, (count, 2))) * np.array([(60.0, 40.0), (1500.0, 10.0)])[kinds]
    return [RequestLengths(int(i), int(o), 0.1 * n + 7.0) for n, (i, o) in enumerate(sizes + 1)]


def test_a_traces_requests_become_those_of_services_at_a_rate():
    rows = trace(1640)
    timeline = seallm_arrivals.of_trace(rows, 20.0)
    past = timeline.past.asked
    assert sum(len(own.inputs) for own in past.values()) == seallm_arrivals.PAST
    assert sum(len(own.inputs) for own in timeline.asked.values()) == 1000
    assert timeline.past.rate_seq_s == pytest.approx(20.0, rel=0.03)
    assert sum(service.popularity for service in timeline.services) == pytest.approx(1)
    arrivals = np.sort(np.concatenate([own.arrival_s for own in timeline.asked.values()]))
    assert arrivals[0] == pytest.approx(0) and timeline.seconds == pytest.approx(arrivals[-1])
    assert np.diff(arrivals) == pytest.approx(0.05)  # as spread out as in the trace
    for name, own in timeline.asked.items():
        assert (own.inputs + own.outputs <= own.service.model.context).all()
        if not len(past[name].inputs):  # the second kind
            assert own.arrival_s.min() > 8 and own.inputs.mean() > 500


def test_all_systems_are_compared_at_a_traces_arrivals(tmp_path, monkeypatch):
    monkeypatch.setattr(seallm_arrivals, "PAST", 200)
    folder = tmp_path / "azure"
    folder.mkdir()
    lines = [
        f"2023-11-16 18:{n // 600:02d}:{n % 600 / 10:06.3f},{r.input},{r.output}" for n, r in enumerate(trace(600))
    ]
    (folder / "AzureLLMInferenceTrace_code.csv").write_text(
        "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines])
    )
    monkeypatch.delenv("EXEGPT_DATA", raising=False)
    assert [load.arrivals for load in seallm_arrivals.real_loads()] == ["drift"] and not seallm_arrivals.real_loads(
        True
    )
    monkeypatch.setenv("EXEGPT_DATA", str(tmp_path))
    (load,) = seallm_arrivals.real_loads(quick=True)
    compared = seallm_arrivals.compare(load)
    figures = [*compared.systems.values(), *(kind.figures for kind in compared.replaced.values())]
    assert len(figures) == 5 and {own.requests for own in figures if own} == {400}
    assert compared.replaced["adaptive"].intervals_s and not compared.replaced["fixed"].intervals_s
    assert all(len(row) == 11 for row in seallm_arrivals.section([compared]).rows)


def test_alpaserve_places_by_requests_in_time_alone():
    """At a light load all degrees have every request in time: the lowest is taken, where SeaLLM prefers short times."""
    asked = traffic_of(Traffic(2.0, 1.0, 60.0, 3), services())
    history = seallm_systems.History(services(), asked, 4, 2.0)
    placed = {name: seallm_systems.two_stage(history, seallm_systems.RULES[name]) for name in ("AlpaServe", OURS)}
    assert placed["AlpaServe"].in_time == placed[OURS].in_time == 1
    assert placed["AlpaServe"].tp == 1 < placed[OURS].tp and placed[OURS].normalised < placed["AlpaServe"].normalised


def test_the_time_of_a_placement_is_that_of_its_search():
    small, none = placement_times([(2, 8), (1, 16)])
    assert (small.gpus, small.services) == (16, 8) and small.cpu_s > 0 and small.degree in (1, 2, 4, 8)
    assert none.gpus == 8 and none.degree is None  # four 70B alone fill more than a node


def result():
    """A light load that lands, and a heavy one that doesn't."""
    worse = replace(FIGURES, normalised=4.0, in_time=0.5, tail_s=20.0, ttft_s=5.0, tpot_s=0.03)
    light = dict.fromkeys(("vLLM", "AlpaServe", "MuxServe", *seallm_systems.RULES), worse) | {OURS: FIGURES}
    heavy = light | {OURS: replace(worse, normalised=5.0, tpot_s=0.04), "MuxServe": None}
    loads = (
        ScenarioResult(SeaLLMScenario("load", 10.0, 4.0), light),
        ScenarioResult(SeaLLMScenario("load", 50.0, 4.0), heavy),
    )
    kinds = {
        "fixed": Replacements(worse, (), (), 0),
        "adaptive": Replacements(FIGURES, (300.0, 270.0), (0.2, 0.2), 3),
    }
    systems = {"vLLM": worse, "AlpaServe": replace(FIGURES, normalised=1.0), "MuxServe": None}
    real = RealComparison(RealLoad("Azure, code", "code.csv", 5.0), systems, kinds)
    return SeaLLM(loads, (real,), (PlacementTime(16, 8, 100, 1.5, 2), PlacementTime(8, 8, 100, 0.1, None)))


def test_what_is_counted():
    shown = sections(result())
    notes = " ".join(note for section in shown for note in section.notes)
    assert "with over 90 % in time, in 1 of 2 loads, not at 50/s with CV 4 (paper: in all)" in notes
    heavy = result().loads[1]
    for alone, late in ((replace(FIGURES, normalised=3.5), 1), (FIGURES, 0)):
        with_row = replace(heavy, systems=heavy.systems | {seallm.ALONE: alone})
        (note,) = seallm._bursts((result().loads[0], with_row), [with_row.scenario])
        assert note.startswith(f"In {late} of the other 1, ")
    assert "ahead of all baselines by L_N in 1 of 2" in notes and "by share in time in 2 of 2" in notes
    assert "L_N rises from SeaLLM to AlpaServe to vLLM to MuxServe in 1 of 2" in notes
    assert "no higher than SeaLLM-F's in 1 of 2" in notes and "TPOT is no higher than AlpaServe's in 1 of 2" in notes
    assert "over vLLM (paper): L_N 2 (10.38), 99 % 2 (12.13), in time 1.9 (1.82); TTFT 5." in notes
    assert "SeaLLM-A's L_N is 2 to 2 times SeaLLM's." in notes and "MuxServe's L_N is" not in notes
    assert "SeaLLM is ahead of all baselines by L_N in 0 of 1 loads" in notes and "Without Azure" not in notes
    texts = [" ".join(row) for section in shown for row in section.rows]
    assert "Azure, code 5 SeaLLM 2 95% 10 1 20 50% 2 of 300 to 270 3" in texts
    assert "16 8 100 1.5 TP2" in texts and "8 8 100 0.1 no placement" in texts
    assert "Without Azure's traces: set EXEGPT_DATA" in seallm_arrivals.section(()).notes[-1]
    for section in (*shown, *sections(SeaLLM(sweeps=result().loads))):
        assert section.rows and all(len(row) == len(section.columns) for row in section.rows)


def test_merged_blocks_beside_split_ones():
    """Golden (SeaLLM, sections 4.4 and 6.4): 36 % of a 13B's block stays empty around a 7B's, whose split table would
    have 1,024 entries for each.
    """
    (blocks,) = [section for section in sections(result()) if section.title.startswith("KV blocks")]
    rows = {row[0]: row[1:] for row in blocks.rows}
    assert rows["llama-2-7b beside llama-2-13b"] == ("1", "36%", "8%", "2", "1,024")
    assert rows["llama-2-7b beside llama-2-7b"] == ("1", "0%", "4%", "2", "1,024")
    assert rows["llama-2-70b beside llama-2-13b"][:2] == ("2", "20%")


def test_the_command_prints_and_emits_it(monkeypatch, capsys):
    monkeypatch.setattr(
        seallm, "reproduce", lambda progress, sweeps, quick: SeaLLM(sweeps=result().loads) if sweeps else result()
    )
    assert main(["reproduce", "seallm", "--sweeps"]) == 0
    swept = capsys.readouterr().out
    assert "no placement" in swept and "SLO scale" not in swept
    assert main(["reproduce", "seallm", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["reproduces"] == "seallm" and document["loads"][0]["systems"]["SeaLLM"]["normalised"] == 2.0
