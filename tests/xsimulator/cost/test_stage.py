"""What an iteration costs: sums done by hand on straight-line tables."""

import numpy as np
import pytest

from tests.xcore.small_specs import profile
from xsimulator.cost.group import Group
from xsimulator.cost.stage import Chunks, StageCost

LAYERS = 12


def cost(**ends):
    tables = profile()
    return StageCost(Group(tables.degree(1), tables.overhead), LAYERS, **ends)


def chunks(tokens, past, completed):
    return Chunks(list(tokens), list(past), completed)


# The straight lines of tests/xcore/small_specs.py, in seconds.
def rest(tokens):
    return 1e-4 + 1e-5 * tokens


def prompt_attention(batch, length):
    return 1e-5 + 1e-8 * batch * length


def chunk_attention(chunk, past):
    return 1e-5 + 1e-9 * chunk * past


def decoding(batch, context):
    return 1e-5 + 1e-8 * batch * context


def embedding(tokens):
    return 1e-8 * tokens


def head(rows):
    return 1e-4 + 1e-5 * rows


def overhead(sequences):
    return 1e-4 + 1e-6 * sequences


def test_ragged_prompts_cost_the_mean_of_batches_of_each_length():
    attention = np.mean([prompt_attention(3, length) for length in (10, 20, 90)])
    expected = LAYERS * (rest(120) + attention) + embedding(120) + head(3) + overhead(3)
    assert cost().step(chunks([10, 20, 90], [0, 0, 0], 3), 0, 0.0) == pytest.approx(expected)


def test_a_mixed_iteration_runs_the_rest_once_on_all_tokens():
    attention = prompt_attention(1, 50) + chunk_attention(30, 64) + decoding(4, 100)
    expected = LAYERS * (rest(84) + attention) + embedding(84) + head(4 + 1) + overhead(4 + 2)
    assert cost().step(chunks([50, 30], [0, 64], 1), 4, 100.0) == pytest.approx(expected)


def test_a_chunk_that_completes_no_prompt_has_no_row():
    expected = LAYERS * (rest(64) + prompt_attention(1, 64)) + embedding(64) + overhead(1)
    assert cost().step(chunks([64], [0], 0), 0, 0.0) == pytest.approx(expected)


def test_embedding_and_head_live_on_the_outer_stages():
    full = float(cost().decode(8, 200))
    assert full - float(cost(first=False).decode(8, 200)) == pytest.approx(embedding(8))
    assert full - float(cost(last=False).decode(8, 200)) == pytest.approx(head(8))


def test_decoding_broadcasts_over_expected_batches():
    batches, contexts = np.array([2.5, 8.0]), np.array([100.0, 130.5])
    expected = LAYERS * (rest(batches) + decoding(batches, contexts)) + embedding(batches) + head(batches)
    np.testing.assert_allclose(cost().decode(batches, contexts), expected + overhead(batches))


def test_what_lies_outside_the_grid_is_answered_and_named():
    stage = cost()
    stage.decode(8, 200)
    assert not stage.group.extrapolated
    stage.decode(8, 5000)
    assert stage.group.extrapolated == {"decode_attention"}
