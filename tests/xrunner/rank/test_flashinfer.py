"""An engine whose attention is FlashInfer's, by the stand-in: its tokens, its plans, and where it is refused."""

import json
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from exegpt.kernels import attention_flashinfer
from exegpt.kernels.attention_flashinfer import FlashInfer
from exegpt.kernels.gpu_device import Architecture
from tests.kernels import flashinfer_stand_in
from tests.kernels.gpu import INTERPRETED
from tests.xrunner.models.test_shard import sharded
from xcore.errors import InputError
from xrunner.comm.ranks import Ranks
from xrunner.core.engine import Engine
from xrunner.models import Planning, load_model
from xrunner.models.attention_planning import check_attention, choose_attention, described
from xrunner.models.create import create_model
from xrunner.rank import warm_up
from xrunner.rank.warm_up import alike

from .. import cells
from ..cells import requests
from ..stand_in import StandIn

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=1 was not set when it began")

SIZES = {"layers": 1, "hidden": 32, "heads": 2, "ffn": 48, "vocab": 300, "context": 96}
LENGTHS = [(9, 3), (1, 4), (40, 5), (20, 2)]
GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A Llama of one KV head, and a Mistral whose window is shorter than prompts."""
    root = tmp_path_factory.mktemp("models")
    create_model(root / "llama", "llama", kv_heads=1, seed=5, **SIZES)
    create_model(root / "mistral", "mistral", seed=5, **SIZES)
    config = json.loads((root / "mistral/config.json").read_text())
    (root / "mistral/config.json").write_text(json.dumps(config | {"sliding_window": 7}))
    return {arch: root / arch for arch in ("llama", "mistral")}


@pytest.fixture(autouse=True)
def no_products(monkeypatch):
    """The warm-up's matrix products are the CPU's, and slow by interpreted kernels."""
    monkeypatch.setattr(warm_up, "_warm_up_rows", lambda *arguments: None)


def plan(model, policy, **variables):
    return cells.schedule(model.spec, policy, kv_blocks=16, **variables)


def run(path, policy, lengths=LENGTHS, graphs=True, **variables):
    """Tokens by FlashInfer, what the GPU did, and FlashInfer's calls."""
    with flashinfer_stand_in.in_its_place() as calls:
        model, gpu = load_model(path, attention="flashinfer"), StandIn()
        engine = Engine(model, plan(model, policy, **variables), gpu=gpu)
        if not graphs:
            engine.worker.compute.graphs = None
        return {r.id: r.output_ids for r in engine.run(requests(lengths)).results}, gpu, list(calls)


def reference(path, policy, lengths=LENGTHS, **variables):
    model = load_model(path)
    return {r.id: r.output_ids for r in Engine(model, plan(model, policy, **variables)).run(requests(lengths)).results}


@pytest.mark.parametrize(
    ("arch", "policy", "graphs"),
    [("llama", "rra", True), ("llama", "orca", False), ("mistral", "chunked", True)],
)
def test_tokens_are_the_cpus(paths, arch, policy, graphs):
    got, gpu, calls = run(paths[arch], policy, graphs=graphs)
    assert got == reference(paths[arch], policy)
    assert bool(gpu.replayed) == graphs
    planned = sum(method == "plan" for _, method, _, _ in calls)
    assert sum(method == "run" for _, method, _, _ in calls) >= planned > 0
    decoding = [names for name, method, _, names in calls if "Decode" in name and method == "__init__"]
    assert any("paged_kv_indptr_buffer" in names for names in decoding) == graphs


def test_every_replay_is_planned(paths, monkeypatch):
    """Without it a graph attends to what was planned before."""
    lengths = [(9, 4), (20, 4), (5, 4)]  # padded to four
    variables = {"encode_batch": 3}
    expected = reference(paths["llama"], "static", lengths, **variables)
    got, gpu, _ = run(paths["llama"], "static", lengths, **variables)
    assert got == expected and gpu.replayed
    real, last = FlashInfer.plan, {}

    def once(self, *arrays):
        if self._graph is None or id(self) not in last:
            last[id(self)] = self
            return real(self, *arrays)
        return self

    monkeypatch.setattr(FlashInfer, "plan", once)
    assert run(paths["llama"], "static", lengths, **variables)[0] != expected


def test_each_part_of_a_batch_has_its_plan(paths):
    """A prompt of one token beside decoding ones: both parts are decoding's, and must not share a plan."""
    lengths = [(20, 5), (1, 3), (33, 2)]
    assert run(paths["llama"], "orca", lengths, graphs=False)[0] == reference(paths["llama"], "orca", lengths)


def test_shards_plan_their_share_of_the_heads(paths):
    """Two ranks of a tensor-parallel group, each in its thread: prompts, then decoding."""
    turn = threading.Lock()  # Triton's interpreter runs one kernel at a time

    def load(shard):
        def all_reduce(x):
            turn.release()
            try:
                return shard.all_reduce(x)
            finally:
                turn.acquire()

        return load_model(path, shard=replace(shard, all_reduce=all_reduce), attention="flashinfer")

    def states_in_turn(model):
        with turn:
            return states(model)

    @torch.inference_mode()
    def states(model):
        cache = model.new_cache(8, 16)
        planning, results = Planning.of(model, cache), []
        for new, context in ((20, 20), (1, 21)):
            batch = alike(3, new, context, 16, None, 2, model.device)
            if planning:
                batch = planning.planned(batch, batch.attention)
            results.append(model.forward(batch, cache))
        return torch.cat(results)

    path = paths["mistral"]
    unsplit = states(load_model(path))
    with flashinfer_stand_in.in_its_place() as calls:
        shards = sharded(load, 2, states_in_turn)
    assert sum(method == "run" for _, method, _, _ in calls) == 4
    for mine in shards:
        torch.testing.assert_close(mine, unsplit, atol=5e-5, rtol=1e-4)


def test_the_engine_of_another_schedule_keeps_the_attention(paths):
    """On the same stages with the same model, and where the model is loaded again."""
    path, lengths = paths["llama"], [(20, 2), (5, 3)]
    model, expected = load_model(path), reference(paths["llama"], "static", lengths)
    with flashinfer_stand_in.in_its_place() as calls:
        engine = Engine.load(path, plan(model, "rra"), Ranks(), attention="flashinfer")
        for reload in (False, True):
            if reload:
                engine.close()
            engine = engine.onward(path, plan(model, "static"))
            calls.clear()
            results = engine.run(requests(lengths)).results
            assert any(method == "run" for _, method, _, _ in calls)
            assert {r.id: r.output_ids for r in results} == expected


@pytest.fixture
def installed(monkeypatch):
    """A GPU that takes FlashInfer, which is there."""
    monkeypatch.setattr(attention_flashinfer, "architecture", lambda device: Architecture(90, 132, 227 * 1024))
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_stand_in)


def spec(head_size=128, encoder_layers=0):
    return SimpleNamespace(name="m", head_size=head_size, encoder_layers=encoder_layers)


def test_auto_takes_flashinfer_where_it_can_with_a_note(installed, monkeypatch):
    assert choose_attention("auto", spec(), "bf16", GPU) == (
        "flashinfer",
        ("attention: flashinfer 0.7.2.stand-in",),
    )
    for heads, device, why in [
        ((spec(80), "bf16"), GPU, "triton, since FlashInfer supports the head sizes 64, 128, 256, not 80"),
        ((spec(), "fp32"), GPU, "triton, since FlashInfer computes in float16 and bfloat16, not in float32"),
        ((spec(64, 12), "bf16"), GPU, "triton, since FlashInfer has no position bias"),
        ((spec(), "bf16"), torch.device("cpu"), "the CPU's, since FlashInfer runs only on GPUs"),
    ]:
        chosen, (note,) = choose_attention("auto", *heads, device)
        assert chosen == "triton" and note.startswith(f"attention: {why}")
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    chosen, (note,) = choose_attention("auto", spec(), "bf16", GPU)
    assert chosen == "triton" and "not installed" in note


def test_a_named_attention_is_taken_or_refused(installed, monkeypatch):
    assert choose_attention("flashinfer", spec(), "fp16", GPU) == ("flashinfer", ())
    assert choose_attention(None, spec(80), "fp32", GPU) == choose_attention("triton", spec(), "bf16", GPU)
    assert described("triton", GPU) == "triton" and described("triton", torch.device("cpu")) is None
    with pytest.raises(InputError, match=r"'m' here: FlashInfer supports the head .* Pass --attention triton"):
        choose_attention("flashinfer", spec(80), "fp16", GPU)
    with pytest.raises(InputError, match="'cudnn' is not known: use one of triton, flashinfer, auto"):
        choose_attention("cudnn", spec(), "fp16", GPU)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(InputError, match="not installed"):
        check_attention("flashinfer", spec(), "fp16", GPU)


def test_an_engine_refuses_what_it_can_not_have(paths):
    schedule = plan(load_model(paths["llama"]), "rra")
    with pytest.raises(InputError, match="only on GPUs"):
        Engine.load(paths["llama"], schedule, Ranks(), attention="flashinfer")
