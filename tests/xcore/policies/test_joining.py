"""Joining: how many waiting sequences are as much work as a batch of prompts, and how far ahead blocks must suffice."""

import pytest

from tests.xcore.small_specs import schedule
from xcore.batching import BlockPool, Forecast, Ledger, Sequence
from xcore.batching.sequence import PREEMPTED
from xcore.orders import fcfs
from xcore.policies.from_schedule import make_policy
from xcore.policies.joining import Joining
from xcore.specs.cluster import parse_cluster
from xcore.specs.schedule import Stage
from xcore.specs.workload import LengthDistribution, Workload


def waiting(prompts):
    """Sequences of (input, output tokens to recompute), 0 for those that were never preempted."""
    sequences = []
    for i, (tokens, recomputed) in enumerate(prompts):
        sequence = Sequence(i, tokens, 100)
        if recomputed:
            sequence.status, sequence.recomputed, sequence.generated = PREEMPTED, recomputed, recomputed
            sequence.to_prefill = tokens + recomputed
        sequences.append(sequence)
    return sequences


@pytest.mark.parametrize(
    ("prompts", "admitted"),
    [
        ([(10, 0)] * 9, 4),
        ([(10, 20), *[(10, 0)] * 9], 2),  # three prompts' work, and one
        ([(10, 20), (10, 20), *[(10, 0)] * 9], 1),
        ([(10, 90), *[(10, 0)] * 9], 1),  # more than a batch, but it must come back
        ([(2, 1), (2, 1), (2, 1), (2, 1), (2, 1)], 4),  # a short one is a prompt all the same
        ([(50, 0)] * 9, 4),  # lengths of prompts even out
        ([(10, 0)] * 3, 3),
    ],
)
def test_a_preempted_sequence_is_as_many_prompts_as_it_has_tokens_to_prefill(prompts, admitted):
    ledger = Ledger(BlockPool(10_000, 16), fcfs, admission="grow")
    ledger.submit(waiting(prompts))
    joining = Joining(10.0, forecast=Forecast(LengthDistribution.fixed(100), 4))
    assert [s.index for s in joining.admit(ledger, 0.0, 4)] == list(range(admitted))


WAA_STAGES = (
    Stage((0,), 1, "encode", None, (0, 6)),
    Stage((1,), 1, "encode", None, (6, 12)),
    Stage((2,), 1, "decode", None, (0, 12)),
)


@pytest.mark.parametrize(
    ("policy", "changes", "ahead"),
    [
        ("rra", {}, 8),
        ("waa-c", {"stages": WAA_STAGES, "cluster": parse_cluster("4xA40")}, 5),
    ],
)
def test_blocks_must_suffice_until_the_next_sequences_join(policy, changes, ahead):
    """RRA's phase of 8 iterations; in WAA, with a batch at each, those on two stages (3), in transfer, and next."""
    workload = Workload.fixed(15, 500)
    for blocks, admitted in ((15 + ahead, 1), (14 + ahead, 0)):
        plan = schedule(policy, workload=workload, admission="grow", encode_batch=1, kv_blocks=blocks, **changes)
        ledger = Ledger(BlockPool(blocks, 1), fcfs, admission="grow")
        ledger.waiting.push(Sequence(0, 15, 500))
        assert len(make_policy(plan).joining.admit(ledger, 0.0, 1)) == admitted
