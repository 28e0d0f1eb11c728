"""On a CPU, a timed part takes its turn in an iteration whose other parts aren't timed."""

from types import SimpleNamespace

import pytest
import torch

from xprofiler import iteration as iteration_module
from xprofiler import passes, timing
from xprofiler.iteration import Iteration
from xrunner.models import load_model
from xrunner.models.create import create_model

LAYERS = 3


@pytest.fixture
def model(tmp_path):
    create_model(tmp_path / "m", "llama", layers=LAYERS, hidden=32, heads=2, kv_heads=1, ffn=64, vocab=300, context=48)
    return load_model(tmp_path / "m")


@pytest.fixture
def order(monkeypatch):
    """The calls of parts, in order: each layer's halves, attention with its shape, and the head with its rows."""
    calls = []
    real = passes.layer_calls

    def attention(model, probe, batch, context):
        return lambda: calls.append(("attention", batch, context))

    def head(model, rows):
        return lambda: calls.append(("head", rows))

    def layers(model, tokens, encoder=False, between=None):
        def run(number):
            calls.append((f"layer {number}", tokens))
            if between:
                between()

        return [lambda n=n: run(n) for n in range(len(real(model, tokens, encoder)))]

    for name, function in (("decoding_attention", attention), ("head_pass", head), ("layer_calls", layers)):
        monkeypatch.setattr(iteration_module, name, function)
    return calls


@torch.inference_mode()
def run(part):
    part.before()
    part.call()


def test_layers_take_turns_with_attention_after_the_head(model, order):
    part = Iteration(model).layers(5)
    run(part)
    layers = [step for n in range(LAYERS) for step in ((f"layer {n}", 5), ("attention", 5, 48))]
    assert order == [("head", 5), *layers]
    assert part.untimed and part.untimed.seconds > 0


def test_the_head_follows_all_layers_and_attention_follows_one(model, order):
    iteration = Iteration(model)
    run(iteration.head(2))
    assert order == [step for n in range(LAYERS) for step in ((f"layer {n}", 2), ("attention", 2, 48))] + [("head", 2)]
    order.clear()
    part = iteration.attention(lambda: order.append("timed"), 7)
    for _ in range(2):
        run(part)
    assert order == [("layer 0", 7), "timed", ("layer 1", 7), "timed"]


def test_the_other_parts_are_those_of_few_sequences(model, order):
    iteration = Iteration(model, most=1)
    run(iteration.layers(1000))
    run(iteration.head(1000))
    few = ("attention", 64, 48)
    assert order == [("head", 64), ("layer 0", 1000), few, ("layer 0", 64), few, ("head", 1000)]


def test_on_a_gpu_each_part_is_alone(model, order, monkeypatch):
    kept = {name: getattr(model, name) for name in ("spec", "layers", "head")}
    there = SimpleNamespace(**kept, device=SimpleNamespace(type="cuda"))
    monkeypatch.setattr(iteration_module, "AttentionProbe", None)
    monkeypatch.setattr(iteration_module, "layer_calls", lambda *at: [lambda: order.append("layer")] * LAYERS)
    iteration = Iteration(there)
    for part in (iteration.layers(5), iteration.head(5), iteration.attention(lambda: order.append("timed"), 5)):
        assert part.untimed is None
        run(part)
    assert order == ["layer"] * LAYERS + [("head", 5), "timed"]


def test_what_is_untimed_does_not_count(monkeypatch):
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(timing, "time", clock)

    def takes(seconds):
        clock.now += seconds

    pause = timing.Untimed(lambda: takes(5.0))

    def call():
        takes(1.0)
        pause()
        takes(2.0)

    assert timing.timed(call, budget_s=0.0, least=2, untimed=pause).seconds == 3.0
    assert pause.seconds == 3 * 5.0  # the warm-up, too


def test_decoding_tokens_have_blocks_of_their_own(model):
    _, slots = passes._scattered(model, 40)
    assert sorted((slots // 16).tolist()) == list(range(40))
    cache, slots = passes._scattered(model, 300)
    assert len(cache.values[0]) == 19 and len(set(slots.tolist())) == 300


@torch.inference_mode()
def test_an_encoder_decoder_of_many_layers_has_every_part(tmp_path):
    """More layers than have a cache of their own here."""
    create_model(tmp_path / "t5", "t5", layers=5, hidden=32, heads=2, ffn=64, vocab=300, context=48)
    model = load_model(tmp_path / "t5")
    iteration, seconds = Iteration(model), []
    for part in (
        iteration.layers(20),
        iteration.layers(20, encoder=True),
        iteration.end(passes.cross_projection_pass(model, 20), 20),
        iteration.end(passes.embedding_pass(model, 20), 20),
        iteration.head(4),
        iteration.decoding(4),
    ):
        seconds.append(timing.timed(part.call, budget_s=0.0, before=part.before, untimed=part.untimed).seconds)
    assert min(seconds) > 0
