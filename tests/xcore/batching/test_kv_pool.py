"""The pool of KV blocks beside a plain stack of all of them."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcore.batching import BlockPool
from xcore.errors import InputError


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6))), st.integers(1, 20))
def test_the_same_blocks_as_of_a_stack(steps, total):
    pool, stack, held = BlockPool(total, 16), list(range(total))[::-1], []
    for take, number in steps:
        if take and number <= len(stack):
            expected = [stack.pop() for _ in range(number)]
            held.append(pool.allocate(number))
            assert held[-1] == expected
        elif not take and held:
            blocks = held.pop(number % len(held))
            pool.free(blocks)
            stack += blocks[::-1]
        assert pool.available == len(stack)


def test_what_there_is_not_can_be_neither_taken_nor_given_back():
    pool = BlockPool(3, 16)
    pool.allocate(2)
    with pytest.raises(MemoryError, match="2 KV blocks were requested, but only 1 of 3 are free"):
        pool.allocate(2)
    with pytest.raises(ValueError, match="only 2 were allocated"):
        pool.free([0, 1, 2])
    with pytest.raises(InputError, match="at least 1"):
        BlockPool(0, 16)


def test_a_pool_costs_nothing_before_it_is_used():
    pool = BlockPool(10**15, 16)
    assert pool.allocate(3) == [0, 1, 2] and pool.available == 10**15 - 3


@pytest.mark.parametrize("held", [{0: 2, 1: 1}, {0: 1}, {0: 1, 1: 1, 2: 1}])
def test_a_block_that_is_held_twice_or_lost_is_noticed(held):
    pool = BlockPool(3, 16)
    pool.check(Counter(pool.allocate(2)))
    with pytest.raises(AssertionError, match="free blocks are not 3"):
        pool.check(Counter(held))
