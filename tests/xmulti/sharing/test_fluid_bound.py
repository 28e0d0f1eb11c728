"""The fluid bound, reckoned by hand on linear costs."""

from dataclasses import replace

import pytest

from tests.xmulti.sharing.test_placement import Cost, model
from xmulti.sharing.fluid_bound import highest_factor

SCALE = 1.0
PREFILL_S = SCALE * 1e-4 * 100
"""Of a prompt of 100 tokens, in a batch or alone."""


def decode_s(batch):
    """Of a request's 200 tokens in such a batch, at their mean context."""
    return 200 * Cost(SCALE, 1).decode_seconds(batch, 200.0, 1.0) / batch


def factor(models, bounds=None, room=1e6):
    return highest_factor(models, bounds or [None] * len(models), 1, room, 2048)


def test_a_model_alone_has_its_devices_for_prompts_and_decoding_in_turn():
    """The largest batch, of 256, is the best."""
    found = factor([model("a", 3.0, SCALE)])
    assert found == pytest.approx(1.1 / (3.0 * (PREFILL_S + decode_s(256))))


def test_models_together_have_no_more_than_the_devices_and_the_overlap():
    """Decoding is as quick on four tenths of the multiprocessors."""
    found = factor([model("a", 3.0, SCALE), model("b", 2.9, SCALE), model("c", 2.8, SCALE)])
    assert found == pytest.approx(1.1 * 1.3 / (8.7 * (PREFILL_S + 0.4 * decode_s(256))))
    assert found < factor([model("a", 3.0, SCALE)])


def test_a_batch_is_no_larger_than_memory_and_bounds_allow():
    """Of 10 sequences' keys and values; and of those in which 200 tokens take 1.1 times the bound."""
    one = model("a", 3.0, SCALE)
    by_room = factor([one], room=10.5 * one.kv_bytes)
    assert by_room == pytest.approx(1.1 / (3.0 * (PREFILL_S + decode_s(10))))
    assert factor([one], [200 * Cost(SCALE, 1).decode_seconds(8, 200.0, 1.0) / 1.1 + 1e-9]) == pytest.approx(
        1.1 / (3.0 * (PREFILL_S + decode_s(8)))
    )


class Starts(Cost):
    """Each prefill takes a tenth of a second besides."""

    def prefill_seconds(self, tokens, share):
        return 0.1 + super().prefill_seconds(tokens, share)


def test_prompts_are_computed_together_up_to_the_budget():
    """Four of 100 tokens, in a budget of 400; of longer ones than that one at a time."""
    one = replace(model("a", 3.0, SCALE), cost=lambda devices: Starts(SCALE, devices))
    for prompts, batch in ((400, 4), (399, 3), (99, 1)):
        prefill_s = 0.1 / batch + PREFILL_S
        found = highest_factor([one], [None], 1, 1e6, prompts)
        assert found == pytest.approx(1.1 / (3.0 * (prefill_s + decode_s(256)))), prompts


def test_where_there_is_room_for_one_sequence_it_runs_alone():
    one = replace(model("a", 3.0, SCALE), longest=250)
    assert factor([one], room=1.5 * one.kv_bytes) == pytest.approx(1.1 / (3.0 * (PREFILL_S + decode_s(1))))


def test_what_can_not_run_has_none():
    one = model("a", 3.0, SCALE)
    assert factor([one], [1e-3]) == 0.0 and factor([one], room=one.least_bytes * 0.99) == 0.0
    two = model("b", 3.0, SCALE)
    assert factor([one, two], room=one.least_bytes * 1.99) == 0.0, "each leaves the other room for one sequence"
