"""Room: as many blocks as let a ledger take every request, and no more."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.xcore import small_specs
from xcore.batching import Sequence
from xcore.batching.kv_capacity import grow_to_fit
from xcore.errors import InputError
from xcore.orders import fcfs
from xcore.policies.from_schedule import make_ledger
from xcore.requests.request import Request

LENGTHS = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), max_size=5)


def takes(schedule, lengths) -> bool:
    ledger = make_ledger(schedule, fcfs)
    try:
        ledger.submit([Sequence(i, *of_one) for i, of_one in enumerate(lengths)])
    except InputError:
        return False
    return True


@given(LENGTHS, st.integers(1, 30), st.sampled_from([1, 7, 16]))
def test_the_least_blocks_that_hold_each_request_alone(lengths, blocks, block_size):
    schedule = replace(small_specs.schedule("orca"), kv_blocks=blocks, block_size=block_size)
    larger = grow_to_fit(schedule, [Request(str(i), (1,) * prompt, most) for i, (prompt, most) in enumerate(lengths)])
    assert larger == replace(schedule, kv_blocks=larger.kv_blocks)
    assert takes(larger, lengths) and larger.kv_blocks >= blocks
    if larger.kv_blocks > blocks:
        assert not takes(replace(larger, kv_blocks=larger.kv_blocks - 1), lengths)
