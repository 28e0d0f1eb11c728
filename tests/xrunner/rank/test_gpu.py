"""The runner on a GPU, without one: its copies, graphs and scratch block over the CPU's tensors."""

import dataclasses
import gc
import itertools
import time
import weakref
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from exegpt.kernels import gpu_device
from tests.kernels.gpu import DEVICE, needs_triton
from tests.xrunner import cells
from tests.xrunner.cells import LENGTHS, requests
from tests.xrunner.stand_in import StandIn
from xrunner.comm.direct import DirectTransport
from xrunner.comm.packing import send
from xrunner.comm.place import Place
from xrunner.comm.staged import StagedTransport
from xrunner.comm.transport import STATES
from xrunner.core.engine import Engine
from xrunner.models import Shard, load_model
from xrunner.models.create import create_model
from xrunner.rank.compute import Launched
from xrunner.rank.iteration_graphs import ROWS, SIZES, IterationGraphs
from xrunner.rank.warm_up import Extent
from xrunner.rank.worker import Worker

ARCHITECTURES = {"llama": 2, "gpt2": 4, "t5": 4}


@pytest.fixture(scope="module")
def models(directories, tmp_path_factory):
    t5 = tmp_path_factory.mktemp("models") / "t5"
    create_model(t5, "t5", seed=11, **cells.SIZES)
    return {name: load_model(path) for name, path in (directories | {"t5": t5}).items()}


def run(model, plan, todo, gpu=None):
    engine = Engine(model, plan, gpu=gpu)
    return {r.id: (r.output_ids, r.finish_reason) for r in engine.run(todo).results}, engine


@given(
    st.lists(
        arrays.arrays(st.sampled_from(["i4", "i8", "f4"]), arrays.array_shapes(max_dims=3, min_side=0)), max_size=6
    )
)
def test_arrays_are_sent_by_one_copy(sources):
    gpu, sources = StandIn(), [*sources, np.arange(3)]
    sent = send(sources, gpu)
    assert len(gpu.pins) == 1
    for array, tensor in zip(sources, sent, strict=True):
        assert tensor.shape == array.shape and np.array_equal(tensor.numpy(), array, equal_nan=True)
        assert tensor.numpy().dtype == array.dtype and (tensor.data_ptr() % 16 == 0 or not array.size)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("policy", ["static", "orca", "rra"])
def test_graphs_give_what_the_cpu_gives(models, arch, policy):
    gpu, model = StandIn(), models[arch]
    plan = cells.schedule(model.spec, policy)
    got, engine = run(model, plan, requests(), gpu)
    expected, _ = run(model, plan, requests())
    assert got == expected
    decoded = sum(span.phase == "decode" for span in engine.worker.spans)
    prompted = sum(span.phase in ("encode", "mixed") for span in engine.worker.spans)
    prompted *= arch != "t5"
    assert gpu.replayed == 2 * (decoded + prompted) > prompted  # layers, and the choice behind them
    most, rows = plan.control.of_kind("residents") or len(LENGTHS), Extent.of(plan, LENGTHS).tokens
    captured = len([size for size in SIZES if size < most]) + 1  # the next one holds all
    captured += (arch != "t5") * (len([size for size in ROWS if size < rows]) + 1)
    assert gpu.captured == 2 * captured and (prompted > 0 or arch == "t5")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sampled_tokens_are_the_same(models, arch):
    todo = requests(temperature=0.9, top_k=7, repetition_penalty=1.2, seed=3)
    plan = cells.schedule(models[arch].spec, "rra")
    gpu = StandIn()
    got, engine = run(models[arch], plan, todo, gpu)
    assert got == run(models[arch], plan, todo)[0]
    phases = [span.phase for span in engine.worker.spans]
    assert gpu.replayed == phases.count("decode") + (arch != "t5") * phases.count("encode")  # no greedy choice


@pytest.fixture
def ahead(monkeypatch):
    """(batches on the device when one is launched, rows that take their tokens there, rows) of each launch."""
    seen, outstanding = [], [0]
    launch, complete = Worker.launch, Worker.complete

    def launched(self, batch, start=None):
        outstanding[0] += 1
        seen.append((outstanding[0], 0 if batch.fed is None else len(batch.fed[0]), batch.computed))
        return launch(self, batch, start)

    def completed(self, running):
        outstanding[0] -= 1
        return complete(self, running)

    monkeypatch.setattr(Worker, "launch", launched)
    monkeypatch.setattr(Worker, "complete", completed)
    return seen


@pytest.mark.parametrize("policy", ["static", "hybrid", "orca", "chunked", "rra"])
def test_the_next_step_is_queued_while_one_is_computed(models, ahead, policy):
    plan = cells.schedule(models["llama"].spec, policy)
    got, engine = run(models["llama"], plan, requests(), StandIn())
    assert max(outstanding for outstanding, _, _ in ahead) == 2
    fed = sum(rows for _, rows, _ in ahead)
    # With two micro-batches the tokens of one come while the other is computed.
    assert fed > 0.5 * sum(m for _, m in LENGTHS) if policy != "hybrid" else fed == 0
    spans = sorted(engine.worker.spans, key=lambda span: span.start_s)
    assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(spans))
    assert got == run(models["llama"], plan, requests())[0]


def test_a_repetition_penalty_waits_for_its_tokens(models, ahead):
    plan = cells.schedule(models["llama"].spec, "static")
    run(models["llama"], plan, requests(temperature=0.5, repetition_penalty=1.2), StandIn())
    assert all(rows == 0 for _, rows, _ in ahead)
    ahead.clear()
    todo = requests(temperature=0.9, seed=3)
    got, _ = run(models["llama"], plan, todo, StandIn())
    assert sum(rows for _, rows, _ in ahead) > 0
    assert got == run(models["llama"], plan, todo)[0]


@pytest.mark.parametrize("blocks", [40, 7])
def test_stop_tokens_end_requests_a_step_later_and_change_none(models, ahead, blocks):
    """With few blocks preempted ones too."""
    model = models["llama"]
    plan = cells.schedule(model.spec, "orca", kv_blocks=blocks, admission="grow")
    unsplit, _ = run(model, plan, requests())
    stop = unsplit["7"][0][5]
    model = dataclasses.replace(model, eos=frozenset([stop]))
    todo = requests(ignore_eos=False)
    got, engine = run(model, plan, todo, StandIn())
    assert got == run(model, cells.schedule(model.spec, "orca"), todo)[0]
    assert got["7"][1] == "stop" and (blocks > 7 or engine._driver.ledger.preemptions)
    assert sum(rows for _, rows, _ in ahead) > 0


def test_rows_that_fill_up_touch_nothing_but_the_scratch_block(models):
    """What graphs leave in the cache, beside what iterations without them leave."""
    model, lengths = models["llama"], [(5, 9), (20, 9), (3, 9)]  # three are filled up to four
    plan = cells.schedule(model.spec, "static", encode_batch=3, kv_blocks=12)
    caches = []
    for gpu in (None, StandIn()):
        _, engine = run(model, plan, requests(lengths), gpu)
        caches.append(engine.worker.cache)
    for mine, plain in zip(caches[1].keys + caches[1].values, caches[0].keys + caches[0].values, strict=True):
        assert len(mine) == len(plain) + 1 and mine[-1].any()
        torch.testing.assert_close(mine[:-1], plain, atol=1e-5, rtol=1e-5)


def test_a_preempted_encoder_decoder_catches_up_without_a_graph(models):
    """By several tokens of a sequence, which are as many as a graph's sequences."""
    model, todo = models["t5"], requests([(30, 6), (14, 30)] * 8)
    limits = {"kv_blocks": 24, "admission": "grow", "max_num_seqs": 32, "prefills_per_step": 4}
    plan = cells.schedule(model.spec, "orca", **limits)
    got, engine = run(model, plan, todo, StandIn())
    assert any(span.phase == "decode" and span.tokens > span.sequences for span in engine.worker.spans)
    assert got == run(model, plan, todo)[0]


def test_graphs_are_made_anew_for_longer_sequences(models):
    model, gpu = models["llama"], StandIn()
    plan = cells.schedule(model.spec, "static", encode_batch=2, kv_blocks=12)
    engine = Engine(model, plan, gpu=gpu)
    for lengths, output, begun in (
        ([(5, 4)] * 2, 6, 1),
        ([(5, 4)], 6, 1),
        ([(60, 4)] * 2, 24, 2),
        ([(5, 4)] * 2, 24, 2),
    ):
        before = gpu.replayed
        expected = run(model, plan, requests(lengths))[0]
        assert {r.id: (r.output_ids, r.finish_reason) for r in engine.run(requests(lengths)).results} == expected
        assert (gpu.captured, gpu.begun, gpu.replayed) == (output, begun, before + 8)


class Asked:
    """A message on its way, which may not be polled while a graph is captured."""

    def __init__(self, gpu):
        self.gpu, self.asked = gpu, 0

    def is_completed(self):
        assert not self.gpu.capturing
        self.asked += 1
        return False


@pytest.mark.parametrize("way", ["staged", "direct"])
def test_no_event_is_queried_while_a_graph_is_captured(directories, monkeypatch, way):
    """Neither a sum nor what a rank does between two layers: an event that is queried would invalidate the capture."""
    gpu = StandIn()
    if way == "staged":
        transport = StagedTransport(SimpleNamespace(world=object()), (0,), (), gpu)
        transport.send(torch.zeros(3), 1, STATES)  # its copy has not come
        first = transport._leaving[0][0]
    else:
        transport = object.__new__(DirectTransport)
        first = Asked(gpu)
        vars(transport).update(_leaving=deque([(first, None)]), _sending=deque(), gpu=gpu, _sum=lambda x: x)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    first.asked = 0
    model = load_model(directories["llama"], shard=Shard(0, 1, transport.all_reduce))
    IterationGraphs(model, model.new_cache(3, 16), gpu, samples=True, takes_states=False).capture(2, 2)
    assert gpu.captured == 4 and not first.asked
    transport.progress()
    assert first.asked


def test_the_warm_up_is_done_before_the_clock_starts(models):
    gpu, plan = StandIn(), cells.schedule(models["llama"].spec, "static", encode_batch=2, kv_blocks=12)
    engine = Engine(models["llama"], plan, gpu=gpu)
    engine.run([])
    assert gpu.waited == 1


def test_states_on_their_way_to_the_next_stage_stay_as_they_are(models):
    """Layers work in place on what the stage before sent."""
    plan = cells.schedule(models["llama"].spec, "orca", (1, 1, 1))
    sent, numbers = [], itertools.count()
    transport = SimpleNamespace(
        receive=lambda x, source, tag, between: x.fill_(next(numbers)), send=lambda x, to, tag: sent.append(x)
    )
    worker = object.__new__(Worker)
    vars(worker).update(
        model=models["llama"], place=Place(plan, 1), transport=transport, spans=[], encoded=None, between=None
    )
    vars(worker).update(swap_space=SimpleNamespace(execute=lambda swaps: None))
    compute = SimpleNamespace(
        launch=lambda work, x, between: Launched(x.add_(1), None, None), complete=lambda launched, between: None
    )
    worker.now, worker.compute, worker._ended, worker._report_to = time.perf_counter, compute, 0.0, None
    work = SimpleNamespace(tokens=[0] * 3, phase="decode", micro_batch=0, sequences=3, computed=3, prompts=0)
    work.swaps = ()
    for _ in range(3):
        worker.run(work)
    assert [x.unique().tolist() for x in sent] == [[1], [2], [3]]


def test_graphs_are_gone_before_what_the_ranks_have_together(models):
    """NCCL waits for graphs that hold its sums."""
    model, seen = models["llama"], []
    engine = Engine(model, cells.schedule(model.spec, "static", encode_batch=2, kv_blocks=12), gpu=StandIn())
    engine.run(requests([(5, 4)] * 2))
    graphs = weakref.ref(engine.worker.compute.graphs)
    assert graphs()
    engine.transport = SimpleNamespace(close=lambda: seen.append(graphs()))
    gc.disable()  # what is gone at once, and not at some later moment
    try:
        engine.close()
    finally:
        gc.enable()
    assert seen == [None]


@needs_triton
@pytest.mark.parametrize("arch", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_a_whole_run_by_the_kernels_of_a_gpu(tmp_path, arch, monkeypatch):
    sizes = {"layers": 1, "hidden": 32, "heads": 2, "ffn": 48, "vocab": 300, "context": 64}
    create_model(tmp_path / "m", arch, seed=5, **sizes)
    loaded, lengths = load_model(tmp_path / "m"), [(9, 3), (4, 4), (20, 2)]
    plan = cells.schedule(loaded.spec, "orca", kv_blocks=9)
    expected, _ = run(loaded, plan, requests(lengths))
    gpu = None
    if DEVICE.type == "cpu":
        gpu = StandIn()
        monkeypatch.setattr(gpu_device, "on_gpu", lambda x: True)
    assert run(load_model(tmp_path / "m", device=DEVICE), plan, requests(lengths), gpu)[0] == expected
