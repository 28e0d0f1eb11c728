"""MuxServe's published workloads: read, replayed, and refused where they aren't at hand."""

import pytest

from exegpt.cli import main
from exegpt.reproduction import muxserve_cases
from exegpt.reproduction.muxserve import Case, CasesResult, sections
from exegpt.reproduction.muxserve_cases import SLO_SCALES, PublishedModel, Served, Sums, read_measured, simulate
from tests.public_data import needs_data
from xcore.policies.one_phase import OnePhasePolicy
from xmulti.sharing.replay import replay_unit
from xprofiler.muxserve_tables import muxserve_profiles


def test_where_the_measurements_are_missing_the_way_out_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("EXEGPT_DATA", str(tmp_path))
    assert main(["reproduce", "muxserve"]) == 2
    said = capsys.readouterr().err.strip()
    assert "MuxServe's published measurements" in said and "set EXEGPT_DATA" in said and "\n" not in said


def test_devices_of_a_mesh_and_of_a_degree():
    figures = ("llama-7b", 1.0, "mesh8idx1", 1.0, 10)
    assert PublishedModel("llm-0", *figures).devices == 8
    assert PublishedModel("llm-0", "llama-7b", 1.0, "4", 1.0, 10).devices == 4


def test_what_is_counted():
    """First by both sums; within a fifth; on the right side. The truncated cases count for dedicated devices alone."""
    sums = {"muxserve": (12, 12), "spatial": (10, 10), "temporal": (8, 8)}
    worse = {"muxserve": (12, 9), "spatial": (9, 10), "temporal": (10, 10)}
    good, bad = (
        {
            name: Served(Sums(*both), tuple(both[0] / 50 + scale / 200 for scale in SLO_SCALES))
            for name, both in of.items()
        }
        for of in (sums, worse)
    )
    cases = (Case("0.7", "1.0", good, good), Case("1.3", "1.0", good, bad), Case("0.9", "0.5", good, bad))
    section, sums, in_time = sections(CasesResult(1.0, cases))
    assert [row[-1] for row in section.rows] == ["yes", "no", "no"]
    first, spatial, temporal, sign, _ = section.notes
    assert "1 of 3" in first and "3 of 3" in spatial and "1 of 2" in temporal and "1 of 2" in sign
    assert all(len(row) == len(sums.columns) for row in sums.rows)
    assert sums.rows[2] == ("0.9 × 0.5", "12", "12", "8", "10", "10", "9"), "as the columns stand"
    assert in_time.rows[0] == ("0.7 × 1.0", "muxserve", "25.0", "25.0", "28.0", "28.0", "34.0", "34.0", "–", "–")
    assert in_time.notes[0] == "Off by 1.3 points on average, at most 4.0." and "in 18 of 18" in in_time.notes[1]
    assert sums.notes == ("muxserve: +0.0% to +0.0%.", "temporal: +0.0% to +25.0%.", "spatial: -10.0% to +0.0%.")


@pytest.mark.slow
def test_the_lightest_case_is_near_its_measurement():
    folder = needs_data("muxserve")
    profiles = muxserve_profiles(folder / "llama_a100_cost.json")
    rows = read_measured(folder)["2.1", "0.5"]
    published = {name: Served.published(rows[name]) for name in rows}
    simulated = {name: simulate(profiles, rows[name], name, 1.0) for name in ("muxserve", "spatial")}
    for name, found in simulated.items():
        assert found.sums.plain == pytest.approx(published[name].sums.plain, rel=0.15)
    assert simulated["muxserve"].sums.plain > simulated["spatial"].sums.plain
    assert sum(row.requests for row in rows["muxserve"]) == 6590


def mesh(case, name):
    """The published LLMs of a time-shared mesh, and their loads under each strategy that uses it."""
    folder = needs_data("muxserve")
    profiles = muxserve_profiles(folder / "llama_a100_cost.json")
    rows = [row for row in read_measured(folder)[case]["temporal"] if row.mesh == name]
    return rows, {strategy: muxserve_cases._loads(profiles, rows, strategy) for strategy in ("muxserve", "temporal")}


def test_models_of_a_mesh_have_quotas_and_shares_or_all_of_one_cache():
    rows, loads = mesh(("1.3", "0.75"), "mesh4idx2")
    assert [row.model for row in rows] == ["llama-30b", "llama-30b", "llama-7b", "llama-7b"]
    for strategy, all_of_it in (("muxserve", False), ("temporal", True)):
        (total,) = {load.pool._store.total for load in loads[strategy]}
        gigabytes = total * muxserve_cases.PART_BYTES / 1e9
        assert gigabytes == pytest.approx(4 * (80 - (60 + 60 + 14 + 14) / 4 - 4 * 7.6) * 85.1 / 80, rel=1e-3)
        assert all((load.pool.quota == total) == all_of_it for load in loads[strategy])
    assert {load.limits for load in loads["temporal"]} == {OnePhasePolicy(256)}
    assert [load.limits.prefill_share for load in loads["muxserve"]] == [1, 1, 0.8, 0.8]
    assert all(load.limits.decode_share < 1 for load in loads["muxserve"])
    assert [load.limits.max_num_seqs for load in loads["muxserve"]] == [row.requests for row in rows], "quotas limit"


def test_a_mesh_that_was_measured_at_half_of_what_iterations_allow():
    """1.3 × 0.75, where both LLaMA-30B were measured at less than half of their rates, and of what iterations allow."""
    rows, loads = mesh(("1.3", "0.75"), "mesh4idx2")
    run = replay_unit(loads["temporal"], muxserve_cases.STRATEGIES["temporal"]())
    for row in rows:
        reached = row.requests / run.served[row.llm][-1].finish_s
        assert row.throughput < 0.5 * reached
        assert row.model != "llama-30b" or reached > 0.95 * row.rate > 2 * row.throughput


def test_the_smallest_share_that_has_the_rate():
    cost = muxserve_cases.TableCost(muxserve_profiles(needs_data("muxserve", "llama_a100_cost.json"))["llama-7b"], 1)
    assert muxserve_cases._decode_share(cost, 0.5) == 0.3
    assert muxserve_cases._decode_share(cost, 9.0) == 0.5
    assert muxserve_cases._decode_share(cost, 1000.0) == 0.9
