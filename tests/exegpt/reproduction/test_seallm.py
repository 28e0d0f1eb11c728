"""SeaLLM's evaluation: what its generator states, its systems' rooms and placements, and what is counted."""

import json
from dataclasses import replace

import numpy as np
import pytest

from exegpt.cli import main
from exegpt.reproduction import seallm, seallm_replacement, seallm_systems, seallm_workload
from exegpt.reproduction.seallm import ScenarioResult, SeaLLM, SeaLLMScenario, sections
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
    found = seallm_replacement.adaptive(restart)
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


def result():
    """A light load that lands, and a heavy one that doesn't."""
    worse = replace(FIGURES, normalised=4.0, in_time=0.5, tail_s=20.0, ttft_s=5.0, tpot_s=0.03)
    light = dict.fromkeys(("vLLM", "AlpaServe", "MuxServe", *seallm_systems.RULES), worse) | {OURS: FIGURES}
    heavy = light | {OURS: replace(worse, normalised=5.0, tpot_s=0.04), "MuxServe": None}
    loads = (
        ScenarioResult(SeaLLMScenario("load", 10.0, 4.0), light),
        ScenarioResult(SeaLLMScenario("load", 50.0, 4.0), heavy),
    )
    kinds = {kind: Replacements(FIGURES, (300.0,), (0.2,), 3) for kind in seallm.KINDS}
    return SeaLLM(loads, kinds | {"fixed": Replacements(worse, (), (), 0)})


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
    assert "the fixed placement, has 2 times the L_N" in notes
    for section in (*shown, *sections(SeaLLM(sweeps=result().loads))):
        assert section.rows and all(len(row) == len(section.columns) for row in section.rows)


def test_merged_blocks_beside_split_ones():
    """Golden (SeaLLM, sections 4.4 and 6.4): 36 % of a 13B's block stays empty around a 7B's, whose split table would
    have 1,024 entries for each.
    """
    rows = {row[0]: row[1:] for row in sections(result())[4].rows}
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
