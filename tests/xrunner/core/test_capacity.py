"""Capacity: no batch that a policy chooses needs more than a rank allocates."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.xcore.small_specs import MODEL, schedule
from xcore.batching import Sequence
from xcore.orders import fcfs
from xcore.policies.from_schedule import make_ledger, make_policy
from xcore.specs.schedule import Stage
from xcore.specs.workload import Workload
from xrunner.comm.place import Place
from xrunner.core.capacity import cache_blocks
from xrunner.rank.warm_up import Extent

LONGEST = MODEL.context - 1
SIDES = (Stage((0,), 1, "encode", (0, MODEL.layers), None), Stage((1,), 1, "decode", None, (0, MODEL.layers)))
PLANS = {
    "rra": schedule("rra", encode_batch=10, decode_batch=40, adjust=0.05),
    "waa-c": schedule("waa-c", encode_batch=10, decode_batch=40, adjust=0.05),
}
PLANS["waa-c"] = replace(PLANS["waa-c"], stages=SIDES, cluster=replace(PLANS["waa-c"].cluster, devices_per_node=2))


@pytest.mark.parametrize("policy", PLANS)
@settings(max_examples=30, deadline=None)
@given(inputs=st.lists(st.integers(1, LONGEST), min_size=1, max_size=40) | st.just([LONGEST] * 40))
def test_an_adjusted_batch_fits_where_it_is_prefilled(policy, inputs):
    """Equal prompts of nearly the whole context: more than B_E of them are encoded while few sequences decode."""
    plan = replace(PLANS[policy], workload=Workload.fixed(LONGEST, 1), kv_blocks=40 * 64 + 40)
    ledger = make_ledger(plan, fcfs)
    ledger.submit([Sequence(i, tokens, 1) for i, tokens in enumerate(inputs)])
    chosen = make_policy(plan).joining.admit(ledger, 0.0, plan.control.encode_batch)
    extent = Extent.of(plan, [(tokens, 1) for tokens in inputs])
    assert len(chosen) <= extent.prompts and sum(one.input_tokens for one in chosen) <= extent.tokens
    blocks = sum(ledger.pool.blocks_for(one.to_prefill) for one in chosen)
    assert blocks <= cache_blocks(Place(plan, 0), MODEL)
