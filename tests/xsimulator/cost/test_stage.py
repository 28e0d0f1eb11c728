"""What an iteration costs: sums done by hand on straight-line tables, and expectations against draws."""

import numpy as np
import pytest

from exegpt.builtin_models import builtin_model
from exegpt.cluster import parse_cluster
from exegpt.workload import LengthDistribution, task
from tests.exegpt.nouns import profile
from xprofiler.roofline import roofline_profile
from xsimulator.cost.group import Group, token_totals
from xsimulator.cost.side import Side
from xsimulator.cost.stage import Chunks, StageCost

LAYERS = 12


def cost(**ends):
    tables = profile()
    return StageCost(Group(tables.degree(1), tables.overhead), LAYERS, **ends)


def chunks(tokens, past, completed):
    return Chunks(list(tokens), list(past), completed)


# The straight lines of tests/exegpt/nouns.py, in seconds.
def rest(tokens):
    return 1e-4 + 1e-5 * tokens


def whole(batch, length):
    return 1e-5 + 1e-8 * batch * length


def piece(chunk, past):
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
    attention = np.mean([whole(3, length) for length in (10, 20, 90)])
    expected = LAYERS * (rest(120) + attention) + embedding(120) + head(3) + overhead(3)
    assert cost().step(chunks([10, 20, 90], [0, 0, 0], 3), 0, 0.0) == pytest.approx(expected)


def test_a_mixed_iteration_runs_the_rest_once_on_all_tokens():
    attention = whole(1, 50) + piece(30, 64) + decoding(4, 100)
    expected = LAYERS * (rest(84) + attention) + embedding(84) + head(4 + 1) + overhead(4 + 2)
    assert cost().step(chunks([50, 30], [0, 64], 1), 4, 100.0) == pytest.approx(expected)


def test_a_chunk_that_completes_no_prompt_has_no_row():
    expected = LAYERS * (rest(64) + whole(1, 64)) + embedding(64) + overhead(1)
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
    asked = cost()
    asked.decode(8, 200)
    assert not asked.group.extrapolated
    asked.decode(8, 5000)
    assert asked.group.extrapolated == {"decode_attention"}


@pytest.mark.parametrize("batch", [1, 2, 4, 32])
def test_expected_encoding_is_the_mean_over_drawn_batches(batch):
    """On a roofline, whose bend makes the time at the mean length too short."""
    model, cluster = builtin_model("opt-13b"), parse_cluster("4xA40")
    tables = roofline_profile(model, cluster)
    stage = StageCost(Group(tables.degree(4), tables.overhead), model.layers)
    distribution = task("S").input
    draws = distribution.sample(4000 * batch, np.random.default_rng(0)).reshape(4000, batch)
    seconds = [stage.step(chunks(row, np.zeros(batch), batch), 0, 0.0) for row in draws]
    assert float(stage.encode(batch, distribution)) == pytest.approx(np.mean(seconds), rel=0.01)
    deviation = Side((), (stage,)).encode_deviation(batch, distribution)
    assert deviation == pytest.approx(np.std(seconds), rel=0.35 if batch == 1 else 0.1)


@pytest.mark.parametrize("batch", [1, 3, 50])
def test_token_totals_have_the_sums_moments(batch):
    distribution = LengthDistribution.truncated_normal(200, 90, 512)
    tokens, p = token_totals(batch, distribution)
    mean = tokens @ p
    assert p.sum() == pytest.approx(1.0)
    assert mean == pytest.approx(batch * distribution.mean)
    assert np.sqrt((tokens - mean) ** 2 @ p) == pytest.approx(np.sqrt(batch) * distribution.std, rel=0.01)
    assert (tokens > 0).all()
