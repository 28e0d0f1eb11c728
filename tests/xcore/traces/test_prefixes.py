"""What prompts have in common, by tokens against a comparison of all pairs, and by what traces say of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcore.specs.workload import RequestLengths, Workload
from xcore.traces.prefixes import Prefixes
from xcore.traces.prompt_identity import PromptIdentity

BLOCK = 4


def common(a, b):
    """Equal elements at the beginnings of two lists."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def in_common(prefixes, requests, a, b):
    """Blocks that two requests have in common by their keys, which are alike only at the beginning."""
    first, second = (prefixes.keys(i, requests[i].input + requests[i].output, BLOCK) for i in (a, b))
    alike = common(first, second)
    assert set(first[alike:]).isdisjoint(second) and len(set(first)) == len(first)
    return alike


TEXTS = st.lists(st.lists(st.integers(0, 1), max_size=22), min_size=1, max_size=9)
LONG = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 2), st.integers(0, 90)), min_size=1, max_size=9).map(
    lambda rows: [[*([0] * first), *([token] * rest)] for first, token, rest in rows]
)
"""Texts of few tokens, and of several runs of blocks."""


@given(TEXTS | LONG)
def test_keys_are_alike_where_all_tokens_are(texts):
    prefixes = Prefixes.of_texts(texts, BLOCK)
    keys = [prefixes.keys(i, len(text), BLOCK) for i, text in enumerate(texts)]
    for a, first in enumerate(texts):
        for b, second in enumerate(texts):
            assert common(keys[a], keys[b]) == common(first, second) // BLOCK
            assert a == b or set(keys[a][common(keys[a], keys[b]) :]).isdisjoint(keys[b])


def test_tokens_beyond_those_that_are_known_are_a_requests_own():
    prefixes = Prefixes.of_texts([[1] * 8, [1] * 8], BLOCK)
    first, second = (prefixes.keys(i, 20, BLOCK) for i in range(2))
    assert len(first) == 5 and common(first, second) == 2 and set(first[2:]).isdisjoint(second)


def identified(*rows):
    """Requests from (input, output, arrival, identity's fields)."""
    return [RequestLengths(*row[:3], PromptIdentity(**row[3])) for row in rows]


def test_prefixes_share_as_much_as_both_have():
    requests = identified(
        (40, 1, 0.0, {"prefix": "a", "prefix_tokens": 8}),
        (40, 1, 1.0, {"prefix": "a", "prefix_tokens": 24}),
        (18, 1, 2.0, {"prefix": "a", "prefix_tokens": 30}),
        (40, 1, 3.0, {"prefix": "b", "prefix_tokens": 24}),
    )
    prefixes = Prefixes.of(requests, BLOCK)
    pairs = {(a, b): in_common(prefixes, requests, a, b) for a in range(4) for b in range(a)}
    assert pairs == {(1, 0): 2, (2, 0): 2, (2, 1): 4, (3, 0): 0, (3, 1): 0, (3, 2): 0}


def test_a_turn_continues_prompt_and_answer_of_the_one_that_arrived_before_it():
    requests = identified(
        (40, 4, 5.0, {"conversation": "c"}),  # the second turn, though first in the list
        (10, 10, 1.0, {"conversation": "c"}),
        (60, 9, 2.0, {"conversation": "d"}),
        (48, 9, 9.0, {"conversation": "c"}),
        (12, 9, 11.0, {"conversation": "c"}),  # shorter than the turn before: it has dropped its beginning
    )
    prefixes = Prefixes.of(requests, BLOCK)
    assert in_common(prefixes, requests, 0, 1) == 20 // BLOCK and in_common(prefixes, requests, 3, 0) == 44 // BLOCK
    assert in_common(prefixes, requests, 3, 1) == 20 // BLOCK
    assert [in_common(prefixes, requests, 2, other) for other in (0, 1, 3)] == [0] * 3
    assert [in_common(prefixes, requests, 4, other) for other in (0, 1, 3)] == [0] * 3


def test_a_chat_continues_its_parent():
    requests = identified(
        (10, 10, 0.0, {"chat": "1"}),
        (30, 5, 1.0, {"chat": "2", "parent_chat": "1"}),
        (32, 5, 2.0, {"chat": "3", "parent_chat": "1"}),
        (50, 5, 3.0, {"chat": "4", "parent_chat": "9"}),  # of which nothing is known
    )
    prefixes = Prefixes.of(requests, BLOCK)
    assert [in_common(prefixes, requests, *pair) for pair in ((1, 0), (2, 0), (2, 1), (3, 0))] == [5, 5, 5, 0]


def test_named_blocks_are_alike_up_to_the_first_other_name():
    requests = identified(
        (40, 9, 0.0, {"block_ids": (1, 2, 3), "block_tokens": 16}),
        (30, 9, 1.0, {"block_ids": (1, 2), "block_tokens": 16}),
        (48, 9, 2.0, {"block_ids": (1, 5, 3), "block_tokens": 16}),
        (48, 9, 3.0, {"block_ids": (4, 2, 3), "block_tokens": 16}),
    )
    prefixes = Prefixes.of(requests, BLOCK)
    assert [in_common(prefixes, requests, *pair) for pair in ((1, 0), (2, 0), (2, 1), (3, 0))] == [7, 4, 4, 0]


def test_a_session_begins_with_its_prefix():
    first = {"prefix": "system", "prefix_tokens": 16}
    requests = identified(
        (20, 4, 0.0, first | {"conversation": "a"}),
        (20, 4, 1.0, first | {"conversation": "b"}),
        (40, 4, 2.0, first | {"conversation": "a"}),
    )
    prefixes = Prefixes.of(requests, BLOCK)
    assert [in_common(prefixes, requests, *pair) for pair in ((1, 0), (2, 0), (2, 1))] == [4, 6, 4]


def test_repetitions_have_nothing_in_common():
    requests = identified(*[(20, 4, float(i), {"prefix": "a", "prefix_tokens": 16}) for i in range(3)])
    prefixes = Prefixes.of(requests, BLOCK).repeated(7)
    assert len(prefixes.places) == 7 and all(prefixes.parents < np.arange(len(prefixes.parents)))
    keys = [prefixes.keys(i, 20, BLOCK) for i in range(7)]
    alike = [[common(keys[a], keys[b]) for b in range(7) if b != a] for a in range(7)]
    assert alike[0] == alike[1] == alike[2] == [4, 4, 0, 0, 0, 0] and alike[6] == [0] * 6
    some = prefixes.take([1, 6])
    assert [some.keys(i, 20, BLOCK) for i in range(2)] == [keys[1], keys[6]]


def test_requests_without_identities_have_no_prefixes():
    assert Prefixes.of([RequestLengths(5, 5)] * 3, BLOCK) is None


def test_identities_are_scaled_with_the_lengths():
    identity = {"prefix": "a", "prefix_tokens": 100, "block_ids": (1, 2), "block_tokens": 50, "token_ids": (1,) * 100}
    workload = Workload.from_requests("w", identified(*[(100, 100, 0.0, identity)] * 5))
    scaled, factor, _ = workload.scaled_to(100)
    own = scaled.requests[0].identity
    assert factor == 0.5 and (own.prefix_tokens, own.block_tokens, own.token_ids) == (50, 25, ())
    assert workload.scaled_to(1000)[0].requests == workload.requests


@pytest.mark.parametrize("context", [60, 150])
def test_rows_that_are_left_out_take_no_others_identities_with_them(context):
    """The turns after one that is left out continue the one before it."""
    requests = identified(
        (20, 20, 0.0, {"conversation": "c"}),
        (50, 50, 1.0, {"conversation": "c"}),
        (52, 4, 2.0, {"conversation": "c"}),
    )
    kept = Workload.from_requests("w", requests).within(context).requests
    prefixes = Prefixes.of(kept, BLOCK)
    assert in_common(prefixes, kept, len(kept) - 1, 0) == 10
