"""Output lengths: what ends them, whose stream they come from, and what a context hides of them."""

import json

import numpy as np
import pytest

from tests.exegpt.cli.conftest import run_command
from xcore import document
from xcore.errors import InputError
from xcore.specs.workload import LengthDistribution
from xmulti.files.application_file import read_application
from xmulti.stages.output_lengths import capped, lengths_at, quantiles, uncensored

OUTPUTS = LengthDistribution((1, 10, 100), (0.25, 0.5, 0.25))


def test_lengths_lie_at_their_quantiles():
    assert lengths_at(OUTPUTS, np.array([0.0, 0.2, 0.3, 0.7, 0.8, 0.999])).tolist() == [1, 1, 10, 10, 100, 100]


def test_cap_and_context_end_an_output():
    wanted, prompts = np.array([100, 100, 3]), np.array([10, 60, 60])
    assert capped(wanted, prompts, 64).tolist() == [54, 4, 3]
    assert capped(wanted, prompts, 64, cap=20).tolist() == [20, 4, 3]
    with pytest.raises(InputError, match="64 tokens fills the context"):
        capped(wanted, np.array([1, 1, 64]), 64)


def test_models_have_streams_of_their_own_unless_shared():
    one, other = quantiles(50, 0, "one"), quantiles(50, 0, "other")
    assert (one == quantiles(50, 0, "one")).all() and (one != other).all()
    assert (quantiles(50, 0, "one", shared=True) == quantiles(50, 0, "other", shared=True)).all()
    assert (one != quantiles(50, 1, "one")).all()


def test_a_context_that_cuts_outputs_short_does_not_bias_them():
    """Prompts of many lengths leave room for some outputs only; a histogram has too many short ones."""
    random = np.random.default_rng(0)
    context, true = 100, LengthDistribution((5, 30, 60, 90), (0.2, 0.3, 0.3, 0.2))
    prompts = random.integers(1, 95, 200_000)
    outputs = capped(true.sample(len(prompts), random), prompts, context)
    estimated, beyond = uncensored(outputs, outputs == context - prompts)
    assert 0 < beyond < 0.3, "prompts of 1 to 94 tokens cut all that have 99"
    share = dict(zip(estimated.lengths, estimated.probabilities, strict=True))
    for length, expected in zip((5, 30, 60), (0.2, 0.3, 0.3), strict=True):
        assert share[length] == pytest.approx(expected, abs=0.01)
        assert abs(np.mean(outputs == length) - expected) > 0.01 or length == 5
    assert sum(estimated.probabilities) == pytest.approx(1.0)


def test_with_one_room_for_all_it_is_samullms_estimate():
    """P(n) = outputs that end at n / prompts that leave room for more than n; the rest is on the longest output."""
    outputs = np.array([3, 3, 7, 9, 20, 20, 20, 11])
    estimated, beyond = uncensored(outputs, outputs == 20)
    assert beyond == pytest.approx(3 / 8)
    assert estimated.lengths == (3, 7, 9, 11, 20)
    assert estimated.probabilities == pytest.approx((2 / 8, 1 / 8, 1 / 8, 1 / 8, 3 / 8))


def test_outputs_that_never_end_are_on_the_longest():
    estimated, beyond = uncensored(np.array([90, 80]), np.array([True, True]))
    assert (estimated.lengths, estimated.probabilities, beyond) == ((90,), (1.0,), 1.0)
    with pytest.raises(InputError):
        uncensored(np.array([0]), np.array([True]))


def answers(path, *lines):
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def test_a_log_of_answers_gives_a_nodes_outputs(tmp_path):
    """Of four answers two reach 8 tokens: one ends there, one is cut off. A failed answer says nothing."""
    ended = [{"finish_reason": "stop", "output_ids": [1] * 4}, {"finish_reason": "stop", "output_tokens": 8}]
    cut = [{"finish_reason": "length", "output_tokens": 12}, {"finish_reason": "cancelled", "output_tokens": 2}]
    log = answers(tmp_path / "log.jsonl", *ended, *cut, {"finish_reason": "error", "output_tokens": 1, "text": "x"})
    done = run_command("outputs", "learn", log, "--out", tmp_path / "outputs.json", "--json")
    assert done.code == 0 and json.loads(done.out)["ended"] == 2 and json.loads(done.out)["cut_off"] == 2
    assert done.json["beyond"] == pytest.approx(1 / 3)
    told = run_command("outputs", "learn", log, "--out", tmp_path / "outputs.json")
    assert "33.3% of the outputs are longer than all that finished, and count as 12 tokens" in told.err
    learned = document.read(LengthDistribution, tmp_path / "outputs.json")
    assert learned.lengths == (4, 8, 12) and learned.probabilities == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    node = {"name": "a", "model": "opt-1.3b", "workload": "100/500", "requests": 5, "outputs": "outputs.json"}
    (tmp_path / "application.yaml").write_text(json.dumps({"nodes": [node]}))
    asked = read_application(tmp_path / "application.yaml", "1xA40")
    assert asked.settings["a"].workload.output == learned and asked.table.models[0].outputs == learned


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"output_tokens": 3}, "line 1: an answer needs finish_reason"),
        ({"finish_reason": "stop"}, "line 1: an answer needs output_tokens"),
        ({"finish_reason": "stop", "output_tokens": -1}, "line 1: an answer needs output_tokens"),
        ({"finish_reason": "stop", "output_tokens": True}, "line 1: an answer needs output_tokens"),
        ({"finish_reason": "error", "output_tokens": 3}, "has no answers with tokens"),
    ],
)
def test_a_wrong_log_names_its_line(tmp_path, line, why):
    done = run_command("outputs", "learn", answers(tmp_path / "log.jsonl", line), "-o", tmp_path / "outputs.json")
    assert done.code == 2 and why in done.err and not (tmp_path / "outputs.json").exists()
