"""Steps of one phase: prompts first, as many as their budget of tokens and the blocks allow, then all residents."""

import pytest

from tests.xcore.small_specs import changed, schedule
from xcore.batching import BlockPool, Ledger, Sequence
from xcore.orders import fcfs
from xcore.policies.one_phase import OnePhasePolicy
from xcore.specs.workload import Workload


def ledger_of(*prompts, blocks=100, output=5):
    """Waiting prompts of these tokens."""
    ledger = Ledger(BlockPool(blocks, 16), fcfs)
    ledger.submit([Sequence(i, tokens, output) for i, tokens in enumerate(prompts)])
    return ledger


def run(policy, ledger, phase="both"):
    """The next step, booked: which sequences it prefills and decodes; None where there is none."""
    step = policy.next_step(ledger, 0.0, phase)
    if step is None:
        return None
    assert all(count == s.to_prefill == s.input_tokens for s, count in step.encode)
    done = [s.index for s, _ in step.encode], [s.index for s in step.decode]
    ledger.advance(step)
    return done


@pytest.mark.parametrize(
    ("prompts", "budget", "steps"),
    [
        ((10, 10, 10), 25, [[0, 1], [2]]),
        ((10, 15, 10), 25, [[0, 1], [2]]),  # no less than there is room for
        ((90, 10, 10), 25, [[0], [1, 2]]),  # a longer one runs alone
        ((10, 90, 10), 25, [[0], [1], [2]]),  # and none overtakes it
    ],
)
def test_prompts_run_together_within_the_budget(prompts, budget, steps):
    policy, ledger = OnePhasePolicy(8, budget), ledger_of(*prompts)
    assert [run(policy, ledger) for _ in steps] == [(step, []) for step in steps]
    assert run(policy, ledger) == ([], [0, 1, 2])
    assert policy.together(prompts) == [[prompts[place] for place in step] for step in steps]


def test_no_more_are_resident_than_may_be():
    policy, ledger = OnePhasePolicy(2, 100), ledger_of(10, 10, 10, output=2)
    assert run(policy, ledger) == ([0, 1], [])
    assert policy.first(ledger, 0.0) is None
    assert run(policy, ledger, "encode") is None
    assert run(policy, ledger) == ([], [0, 1])
    assert run(policy, ledger) == ([2], [])


def test_each_phase_alone_does_nothing_of_the_other():
    policy, ledger = OnePhasePolicy(8, 10), ledger_of(10, 10, output=2)
    assert run(policy, ledger, "decode") is None
    assert run(policy, ledger, "encode") == ([0], [])
    assert run(policy, ledger, "decode") == ([], [0])
    assert run(policy, ledger, "decode") is None
    assert run(policy, ledger, "encode") == ([1], []) and run(policy, ledger, "encode") is None


def test_residents_go_on_while_a_prompts_blocks_are_taken():
    """A prompt of 40 tokens and its output take three blocks of five; those that others take count too."""
    policy, ledger = OnePhasePolicy(8, 100), ledger_of(40, 40, blocks=5)
    assert policy.can_prefill(ledger, 0.0) and policy.can_prefill(ledger, 0.0, lambda: 2)
    assert not policy.can_prefill(ledger, 0.0, lambda: 3)
    assert run(policy, ledger) == ([0], [])
    assert not policy.can_prefill(ledger, 0.0)
    assert [run(policy, ledger) for _ in range(4)] == [([], [0])] * 4
    assert run(policy, ledger) == ([1], [])


def test_the_next_prompt_is_one_that_is_ready():
    policy, ledger = OnePhasePolicy(8, 100), ledger_of(10)
    (waiting,) = ledger.waiting
    for last_token_s, first in ((0.0, waiting), (2.0, waiting), (2.1, None)):
        waiting.last_token_s = last_token_s
        assert policy.first(ledger, 2.0) is first
        assert policy.can_prefill(ledger, 2.0) == (first is not None)
    assert policy.first(ledger_of(), 0.0) is None


def test_a_schedules_prompts_are_a_budget_of_mean_length():
    made = schedule("orca", workload=Workload.fixed(20, 10), max_num_seqs=7, prefills_per_step=3)
    assert OnePhasePolicy.of(made) == OnePhasePolicy(7, 60)
    assert OnePhasePolicy.of(changed(made, prefills_per_step=1)).max_num_batched_tokens == 20


def test_prompts_of_as_many_tokens_as_vllm_takes_are_prefilled_together_by_default():
    ledger = ledger_of(1024, 1024, 1, blocks=1000)
    assert [run(OnePhasePolicy(), ledger, "encode")[0] for _ in range(2)] == [[0, 1], [2]]


def test_a_prompt_takes_the_last_block_unless_others_have_it():
    ledger = ledger_of(16, blocks=2, output=16)
    assert OnePhasePolicy().can_prefill(ledger, 0.0) and OnePhasePolicy().can_prefill(ledger, 0.0, lambda: 0)
    assert not OnePhasePolicy().can_prefill(ledger, 0.0, lambda: 1)
