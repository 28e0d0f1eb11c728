"""A continuation is the rest of a replay, from wherever that is stopped."""

from dataclasses import replace

import numpy as np
import pytest

from xcore.batching import MicroBatching, Sequence
from xcore.policies import TRAITS
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.schedule import ModelReference, ProfileReference, Schedule, Stage
from xcore.specs.workload import RequestLengths, task
from xprofiler.roofline import roofline_profile
from xsimulator.cost.cost_model import ReplicaCost
from xsimulator.replay.continuation import Standing, continue_from
from xsimulator.replay.event_queue import run
from xsimulator.replay.event_simulator import replay
from xsimulator.replay.record import Record
from xsimulator.replay.replica import Replica

MODEL, CLUSTER = builtin_model("opt-13b"), parse_cluster("2xA100-80GB")
PROFILE = roofline_profile(MODEL, CLUSTER)
POLICIES = {
    "chunked": {"max_num_seqs": 24, "max_num_batched_tokens": 512},
    "orca": {"max_num_seqs": 24, "prefills_per_step": 2},
    "rra": {"encode_batch": 4, "decode_batch": 24, "decode_iterations": 8},
    "waa-c": {"encode_batch": 2, "decode_batch": 24, "micro_batches": 1},
}


def schedule_of(policy: str, admission: str = "grow") -> Schedule:
    layers = (0, MODEL.layers)
    both = (Stage((0,), 1, "both", None, layers),)
    apart = (Stage((0,), 1, "encode", None, layers), Stage((1,), 1, "decode", None, layers))
    return Schedule(
        version=Schedule.VERSION,
        policy=policy,
        control=TRAITS[policy].control(**POLICIES[policy]),
        model=ModelReference(MODEL, MODEL.fingerprint),
        cluster=CLUSTER,
        workload=task("T"),
        profile=ProfileReference("roofline", "0"),
        stages=apart if policy.startswith("waa") else both,
        kv_blocks=2000,
        dtype="fp16",
        kv_dtype="fp16",
        admission=admission,
    )


def lengths(count: int, seed: int = 0) -> list[tuple[int, int]]:
    rng, work = np.random.default_rng(seed), task("T")
    return list(zip(work.input.sample(count, rng).tolist(), work.output.sample(count, rng).tolist(), strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_from_nothing_it_is_a_replay(policy):
    schedule, pairs = schedule_of(policy), lengths(60)
    whole = replay(schedule, PROFILE, [RequestLengths(i, o, 0.0) for i, o in pairs], timeline=False, lanes=True)
    standing = [Standing(i, o, o) for i, o in pairs]
    after = continue_from(schedule, ReplicaCost.of(schedule, PROFILE), standing, 1e9)
    for served in whole.served:
        assert after[served.index].start_s == served.start_s
        assert after[served.index].finish_s == served.finish_s


@pytest.mark.parametrize("policy", ["chunked", "orca", "rra"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_from_the_middle_it_is_the_rest_of_the_replay(policy, share):
    schedule, pairs = schedule_of(policy), lengths(80, seed=1)
    cost = ReplicaCost.of(schedule, PROFILE)
    whole = replay(schedule, PROFILE, [RequestLengths(i, o, 0.0) for i, o in pairs], timeline=False, lanes=True)
    finish = {served.index: served.finish_s for served in whole.served}
    at = share * whole.seconds
    standing, places = _stopped(schedule, cost, pairs, at)
    after = continue_from(schedule, cost, standing, 1e9)
    errors = [abs(at + c.finish_s - finish[place]) for c, place in zip(after, places, strict=True)]
    assert max(errors) < 0.03 * whole.seconds  # a step that was under way, and where in its phase it was, are not known
    assert np.mean(errors) < 0.015 * whole.seconds


def test_beyond_the_horizon_nothing_is_known():
    schedule = schedule_of("orca")
    after = continue_from(schedule, ReplicaCost.of(schedule, PROFILE), [Standing(100, 50, 50)] * 60, 0.5)
    assert after[0].start_s == 0.0 and after[-1].start_s is None and after[-1].finish_s is None


@pytest.mark.parametrize("admission", ["reserve", "grow"])
def test_sequences_that_find_no_blocks_wait(admission):
    schedule = schedule_of("orca", admission)
    standing = [Standing(1000, 900, 900, 300)] * 30
    after = continue_from(schedule, ReplicaCost.of(schedule, PROFILE), standing, 1e9)
    assert all(c.finish_s is not None for c in after)
    assert after[-1].start_s > 0.0 == after[0].start_s


def test_a_sequence_that_outlives_its_supposed_end_ends_at_its_next_token():
    """It was supposed to have ended after 10 tokens, and has 20; beside it another goes on."""
    schedule = schedule_of("orca")
    cost = ReplicaCost.of(schedule, PROFILE)
    late, other = continue_from(schedule, cost, [Standing(100, 50, 10, 20), Standing(100, 50, 50, 20)], 1e9)
    first, *_ = continue_from(schedule, cost, [Standing(100, 50, 21, 20), Standing(100, 50, 50, 20)], 1e9)
    assert late == first and late.start_s == 0.0
    assert 20 * late.finish_s < other.finish_s < 31 * late.finish_s  # 30 iterations, all but one without the first


def _stopped(schedule, cost, pairs, at):
    """The sequences of a replay that is stopped at some time, and which requests they are."""
    batching = MicroBatching(1)
    replica = Replica(schedule, cost, Record(len(pairs), batching.index, False), batching, step_by_step=True)
    for n, (i, o) in enumerate(pairs):
        replica.submit(Sequence(n, i, o))
    run([replica], at)
    ledger = replica.ledger
    waiting = [*ledger.encoding, *sorted(ledger.waiting, key=lambda sequence: sequence.index)]
    rows = [*((s, s.generated) for s in ledger.decoding), *((s, 0) for s in waiting)]
    return [Standing(s.input_tokens, s.max_output, s.ends, g) for s, g in rows], [s.index for s, _ in rows]


def test_running_sequences_without_blocks_are_prefilled_again():
    """Five of 41 blocks each in a pool of 100: three wait, and end as those that wait with their output as a prompt."""
    schedule = replace(schedule_of("orca", "reserve"), kv_blocks=100)
    costs = ReplicaCost.of(schedule, PROFILE)
    running = continue_from(schedule, costs, [Standing(600, 56, 56, 40)] * 5, 1e9)
    longer = [*[Standing(600, 56, 56, 40)] * 2, *[Standing(640, 16, 16)] * 3]
    again = continue_from(schedule, costs, longer, 1e9)
    assert [one.finish_s for one in running] == pytest.approx([one.finish_s for one in again], rel=1e-9)
    assert running[4].finish_s > running[3].finish_s > running[0].finish_s


def caching(policy: str, **changes) -> Schedule:
    return replace(schedule_of(policy), prefix_caching=True, **changes)


@pytest.mark.parametrize("policy", ["orca", "chunked"])
def test_a_waiting_sequence_prefills_only_what_is_not_kept_for_it(policy):
    schedule, keys = caching(policy), range(60)
    cost = ReplicaCost.of(schedule, PROFILE)
    finishes = [
        continue_from(schedule, cost, [Standing(1000, 2, 2, keys=keys, held=held)], 100.0)[0].finish_s
        for held in (0, 160, 480, 960)
    ]
    assert finishes == sorted(finishes, reverse=True) and finishes[-1] < 0.5 * finishes[0]
    without = continue_from(schedule_of(policy), cost, [Standing(1000, 2, 2, keys=keys, held=960)], 100.0)
    assert without[0].finish_s == finishes[0]  # of a schedule that caches nothing, nothing is kept


@pytest.mark.parametrize("policy", ["orca", "chunked"])
def test_running_sequences_with_the_same_prefix_hold_its_blocks_once(policy):
    """Ten prompts of 40 blocks, 30 of which are the same: 130 blocks, and a place for one more."""
    shared = [Standing(640, 20, 20, 5, (*range(30), *range(100 * n, 100 * n + 10))) for n in range(1, 11)]
    starts = []
    for present in (shared, [replace(row, keys=()) for row in shared]):
        schedule = caching(policy, kv_blocks=200)
        after = continue_from(schedule, ReplicaCost.of(schedule, PROFILE), [*present, Standing(640, 20, 20)], 100.0)
        starts.append(after[-1].start_s)
    assert starts[0] == 0.0 < starts[1]


def test_a_waiting_sequence_counts_on_no_other_blocks_than_those_kept_for_it():
    """A running sequence has the others now, but may have ended before it starts."""
    schedule = caching("orca")
    running = Standing(1000, 50, 50, 5, range(62))
    finishes = [
        continue_from(schedule, ReplicaCost.of(schedule, PROFILE), [running, waiting], 100.0)[1].finish_s
        for waiting in (
            Standing(1000, 2, 2),
            Standing(1000, 2, 2, keys=range(62)),
            Standing(1000, 2, 2, keys=range(62), held=480),
        )
    ]
    assert finishes[0] == finishes[1] > finishes[2]


def test_a_waiting_sequence_counts_on_the_cached_tokens_that_are_kept_for_it_alone():
    """Of a prompt that a running sequence has whole, two blocks are kept: it is as if they shared these two only."""
    schedule = replace(schedule_of("orca"), prefix_caching=True)
    cost, size = ReplicaCost.of(schedule, PROFILE), schedule.block_size
    shared, others = [f"block {i}" for i in range(60)], [f"other {i}" for i in range(58)]

    def ends(keys, held):
        standing = [Standing(60 * size + 1, 50, 50, 5, shared), Standing(60 * size + 1, 50, 50, 0, keys, held)]
        return [each.finish_s for each in continue_from(schedule, cost, standing, 1e9)]

    assert ends(shared, 2 * size) == ends([*shared[:2], *others], 2 * size)
    assert ends(shared, 40 * size)[1] < ends(shared, 2 * size)[1]
