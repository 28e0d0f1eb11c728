"""The closed-loop replay of a published campaign: its turns, and one run's errors where the data are."""

from dataclasses import replace

import pytest

from benchmarks.multi_turn import (
    HIT_POINTS,
    LIMITS,
    compare,
    front_end_of_fifth,
    hit_rate,
    lru_hit_rate,
    read_runs,
    server_of,
)
from tests.public_data import needs_data
from xcore.specs.request_times import RequestTimes
from xcore.specs.workload import RequestLengths
from xcore.traces.prompt_identity import PromptIdentity
from xsimulator.replay.dependent_requests import replay_dependent


def turn(conversation, input, output):
    return RequestLengths(input, output, 0.0, PromptIdentity(conversation=conversation))


def test_an_lru_cache_forgets_what_was_used_longest_ago():
    turns = [turn("a", 32, 17), turn("b", 64, 1), turn("a", 64, 1), turn("b", 80, 1)]
    tokens = 32 + 64 + 64 + 80
    alone = [RequestTimes(i, own.input, own.output, i, i, i, i + 0.5) for i, own in enumerate(turns)]
    assert lru_hit_rate(turns, alone, 100, 16) == (48 + 64) / tokens
    assert lru_hit_rate(turns, alone, 7, 16) == (48 + 48) / tokens, "the end of b went for that of a"
    assert lru_hit_rate(turns, alone, 4, 16) == 0.0
    assert lru_hit_rate(turns, [replace(times, finish_s=9.0) for times in alone], 1, 16) == (32 + 64) / tokens, (
        "blocks of running turns stay, and outputs are there in the end"
    )


def test_a_run_of_sixteen_clients_is_a_closed_loop():
    needs_data("measured", "inferencex", "multiturn_llama70b_fp4_b200_vllm_requests.csv.gz")
    runs = read_runs()
    assert [(run.tp, run.clients) for run in runs] == [(2, 16), (2, 512), (4, 16), (4, 512)]
    run = runs[0]
    assert sum(before is None for before in run.after) == run.clients and len(run.turns) == 3615
    assert max(before.seconds for before in run.after if before) < 0.1, "clients think of nothing"


@pytest.mark.slow
def test_hits_fall_as_those_of_an_lru_cache():
    needs_data("measured", "inferencex", "multiturn_llama70b_fp4_b200_vllm_requests.csv.gz")
    run = read_runs()[1]
    schedule, profile = server_of(run, 0.0)
    part = replace(schedule, kv_blocks=schedule.kv_blocks * 3 // 4)
    served = replay_dependent(part, profile, run.turns, run.after).served
    alone = lru_hit_rate(run.turns, served, part.kv_blocks, part.block_size)
    assert 0.4 < hit_rate(served) < 0.6 and hit_rate(served) == pytest.approx(alone, abs=0.03)


@pytest.mark.slow
def test_hit_rates_and_times_are_the_measured_ones():
    """Nothing is fitted to these runs; the time outside the engine is that of a fifth one."""
    needs_data("measured", "inferencex", "multiturn_llama70b_fp4_b200_vllm_requests.csv.gz")
    front_end_s = front_end_of_fifth()
    for run in read_runs():
        replayed, errors = compare(run, front_end_s)
        assert hit_rate(replayed.served) == pytest.approx(run.hit_rate, abs=HIT_POINTS)
        for name, error in errors.items():
            assert abs(error) < LIMITS[name], (run.name, name)
