"""What the paper measured with OPT-13B on four A40s, task S: RRA's rows of Table 6, and Table 7's phases.

The paper's figures are held to 15 %, beyond which there is a mistake (the paper's engine, and every kernel).
"""

import pytest

from exegpt.reproduction import table6
from tests.exegpt.cli.conftest import run_command
from tests.xcore.small_specs import schedule
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.workload import task
from xprofiler.roofline import roofline_profile
from xscheduler.allocation import uniform_stages
from xsimulator import estimate
from xsimulator.steady import rra
from xsimulator.steady.outcome import estimate_of
from xsimulator.steady.scenario import Scenario

OPT = builtin_model("opt-13b")
A40 = parse_cluster("4xA40")
PROFILE = roofline_profile(OPT, A40)
ROWS = [(52, 13), (49, 7)]
"""(B_E, N_D) of the table's RRA schedules, T_P = 4."""


def opt_schedule(encode_batch, decode_iterations):
    return schedule(
        "rra",
        OPT,
        task("S").without_requests,
        cluster=A40,
        stages=uniform_stages(OPT, A40, 4),
        dtype="fp16",
        kv_dtype="fp16",
        encode_batch=encode_batch,
        decode_batch=1,
        decode_iterations=decode_iterations,
    )


@pytest.mark.parametrize(("row", "latency_s", "throughput_seq_s"), [(ROWS[0], 10.23, 25.23), (ROWS[1], 16.87, 26.15)])
def test_table_6_rra(row, latency_s, throughput_seq_s):
    predicted = estimate(opt_schedule(*row), PROFILE, steady_state="paper", variation=False)
    assert predicted.latency_s == pytest.approx(latency_s, rel=0.15)
    assert predicted.throughput_seq_s == pytest.approx(throughput_seq_s, rel=0.15)
    assert predicted.feasible


@pytest.mark.parametrize("row", ROWS)
def test_the_papers_latency_is_its_phases_less_the_unused_tail(row):
    """Latency = ceil(63 / N_D) · B_E / throughput but for the last phase's unused iterations."""
    scenario = Scenario.of(opt_schedule(*row), PROFILE, None, "paper", False)
    times, predicted = rra.phase(scenario, *row).times, estimate_of(scenario, rra.outcome(scenario, *row))
    encode_batch, decode_iterations = row
    phases = -(-63 // decode_iterations)
    unused = times.decoded[-1] - times.decoded[62 % decode_iterations]
    assert predicted.latency_s == pytest.approx(phases * encode_batch / predicted.throughput_seq_s - unused)


def test_table_7_phases():
    """Encoding takes 1.68 s, a decoding iteration 0.038 s (Table 7 doesn't say under which of the two schedules)."""
    times = [rra.phase(Scenario.of(opt_schedule(*row), PROFILE, None, "paper", False), *row).times for row in ROWS]
    for phase in times:
        assert phase.encoded == pytest.approx(1.68, rel=0.10)
    rare, often = ((p.decoded[-1] - p.encoded) / len(p.decoded) for p in times)
    assert rare < 0.038 < often
    assert often / rare < 1.5


@pytest.mark.parametrize("row", ROWS)
def test_variation_adds_five_to_six_percent(row):
    """Spec section 5, under the distribution of section 2."""
    plain, careful = (estimate(opt_schedule(*row), PROFILE, variation=v).latency_s for v in (False, True))
    assert 0.045 < careful / plain - 1 < 0.065


@pytest.fixture(scope="module")
def table():
    return table6.reproduce()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_every_row_at_the_papers_own_schedule(table, number):
    """Throughput within 15 %, and RRA's latency. WAA's is 30 to 45 % short, for its iterations are quicker than the
    paper's (docs/theory.md): it is reported, not fitted."""
    row = table.rows[number]
    assert abs(row.deviation.throughput_seq_s) < 0.15
    if row.paper.policy == "rra":
        assert abs(row.deviation.latency_s) < 0.15
    else:
        assert -0.50 < row.deviation.latency_s < 0


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_a_search_finds_no_less_than_the_paper(table, number):
    row = table.rows[number]
    assert row.today.throughput_seq_s >= row.found.throughput_seq_s >= row.paper.throughput_seq_s
    if row.paper.bound_s:
        assert max(row.found.latency_s, row.today.latency_s) <= row.paper.bound_s


@pytest.mark.slow
def test_the_command_prints_both():
    done = run_command("reproduce", "table6")
    assert done.code == 0, done.err
    for text in ("22.41", "23.76", "25.23", "26.15", "3.01", "16.87", "0.041"):
        assert text in done.out
