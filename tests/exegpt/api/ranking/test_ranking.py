"""The ranker: its features, training, file and noise model, and what it reaches on public prompts."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from exegpt.api.ranking.evaluation import evaluate
from exegpt.api.ranking.examples import Example, arrays, of_part, read_examples
from exegpt.api.ranking.training import Recipe, _forward, list_mle, train_classifier, train_ranker
from tests.public_data import needs_data
from xcore.errors import InputError
from xcore.orders.features import BUCKETS, DENSE, Features
from xcore.orders.noise import kendall_tau, noisy_scores
from xcore.orders.ranker import Ranker

QUICK = Recipe(width=8, hidden=16, epochs=6, batch=32, dropout=0.2)


@pytest.fixture(scope="module")
def examples():
    """Prompts of which one word says how long the output is, up to noise."""
    rng, words = np.random.default_rng(3), {"name": 10, "explain": 100, "write": 400}
    rows = []
    for i in range(900):
        word = list(words)[i % 3]
        rows.append(Example(f"{word} thing {rng.integers(200)}", int(words[word] * rng.uniform(0.7, 1.4)), "x"))
    return rows


def test_list_mle_is_the_likelihood_of_the_order():
    """By hand for three prompts, whose lengths put them in the order 1, 2, 0."""
    scores, lengths = torch.tensor([[0.3], [1.1], [-0.4]]), torch.tensor([30.0, 10.0, 20.0])
    e = [math.exp(x) for x in (1.1, -0.4, 0.3)]
    want = -(math.log(e[0] / sum(e)) + math.log(e[1] / (e[1] + e[2]))) / 3
    assert float(list_mle(scores, lengths)) == pytest.approx(want, rel=1e-6)


def test_features_are_of_the_text_alone():
    texts = ["Write a poem, please.", "", "x " * 5000]
    features = Features.of(texts)
    assert len(features) == 3 and features.dense.shape == (3, DENSE)
    assert features.starts[1] > 8 and features.buckets.max() < BUCKETS and features.starts[-1] < 60
    alone = Features.of([texts[2]])
    again = features.rows(np.array([2]))
    assert (alone.buckets == again.buckets).all() and (alone.dense == again.dense).all()


def test_what_is_trained_is_what_is_saved_and_scored(tmp_path, examples):
    features, lengths = arrays(of_part(examples, "train"))
    ranker = train_ranker(features, lengths, QUICK)
    parameters = [torch.as_tensor(getattr(ranker, f.name)) for f in dataclasses.fields(ranker) if f.name != "reference"]
    torched = _forward(parameters, features, 0.0, torch.Generator()).numpy()
    np.testing.assert_allclose(ranker.outputs(features), torched, rtol=1e-4, atol=1e-5)
    ranker.save(tmp_path / "r.npz")
    prompts = [example.prompt for example in of_part(examples, "test")]
    assert (Ranker.load(tmp_path / "r.npz").scores(prompts) == ranker.scores(prompts)).all()
    again = train_ranker(features, lengths, QUICK)
    assert (again.scores(prompts) == ranker.scores(prompts)).all(), "the seed is all that is random"


def test_a_ranker_finds_what_prompts_say(examples):
    train, test = of_part(examples, "train"), of_part(examples, "test")
    rankers = {"ranker": train_ranker(*arrays(train), QUICK), "classifier": train_classifier(*arrays(train), QUICK)}
    rows = {row.name: row.tau for row in evaluate(rankers, train, test).rows}
    assert rows["ranker"] > 0.6 and rows["classifier"] > 0.6, "two of three pairs are of different words"
    assert rows["oracle"] == 1.0
    assert abs(rows["prompt length, long first"]) < 0.4
    assert rows["prompt length, short first"] == pytest.approx(-rows["prompt length, long first"])


def test_the_same_prompt_is_in_one_part_alone():
    parts = {part: of_part([Example(f"prompt {i}", 5) for i in range(2000)], part) for part in ("train", "test")}
    assert 0.6 < len(parts["train"]) / 2000 < 0.8 and 0.1 < len(parts["test"]) / 2000 < 0.2
    assert Example("same", 5).part == Example("same ", 900, "other").part


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04broken"])
def test_other_files_are_no_rankers(tmp_path, content):
    path = tmp_path / "r.npz"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not a ranker"):
        Ranker.load(path)
    np.savez(path, version=np.int64(1), embedding=np.array([{"a": 1}], dtype=object))
    with pytest.raises(InputError, match="is not a ranker"):
        Ranker.load(path)


def test_arrays_that_are_no_rankers_are_refused(tmp_path):
    from xcore.orders.ranker import BUCKETS, DENSE

    shapes = {"embedding": (BUCKETS, 2), "first": (2 + DENSE, 3), "first_bias": (3,), "last": (3, 1), "last_bias": (1,)}
    arrays = {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}
    path = tmp_path / "r.npz"

    def refused(sentence, version=1, **changed):
        np.savez(path, version=np.int64(version), **(arrays | changed))
        with pytest.raises(InputError, match=sentence):
            Ranker.load(path)

    refused("is a ranker of version 2, but this version of exegpt reads version 1: train it again", version=2)
    refused("shapes or non-finite values", last_bias=np.array([np.nan]))
    refused("shapes or non-finite values", embedding=arrays["embedding"][1:])
    np.savez(path, version=np.int64(1), **arrays)
    assert Ranker.load(path).last_bias.shape == (1,)


@pytest.mark.parametrize("tau", [0.55, 0.62, 0.9])
def test_noise_leaves_the_tau_that_is_asked_for(tau):
    """On skewed lengths, for which the formula of log-normal ones is off."""
    rng = np.random.default_rng(1)
    lengths = np.maximum(1, rng.gamma(0.7, 300, 3000)).astype(int).tolist()
    assert kendall_tau(noisy_scores(lengths, tau, seed=4), lengths) == pytest.approx(tau, abs=0.002)
    assert kendall_tau(noisy_scores(lengths, 1.0, seed=4), lengths) > 0.999


@pytest.mark.slow
def test_it_ranks_public_prompts_better_than_their_length_and_kind():
    """On the validation part; the test part is for the figures of docs/log alone."""
    examples = read_examples(needs_data("prompts", "gpteacher.jsonl"))
    train, validation = of_part(examples, "train"), of_part(examples, "validation")
    ranker = train_ranker(*arrays(train), Recipe())
    rows = {row.name: row for row in evaluate({"ranker": ranker}, train, validation).rows}
    tau = rows["ranker"].tau
    assert tau > rows["the kind's median"].tau and rows["ranker"].across > rows["the kind's median"].across
    assert tau > abs(rows["prompt length, long first"].tau) + 0.15
