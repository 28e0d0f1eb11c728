"""A step on a GPU waits for nothing but its tokens: over tensors without data, where whatever reads one fails."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from triton.runtime.jit import KernelInterface

from exegpt.kernels import gpu_device
from tests.xrunner import cells
from tests.xrunner.cells import requests
from xcore.batching import MicroBatch, Sequence
from xrunner.models import load_model
from xrunner.models.create import create_model
from xrunner.rank.assembly import Assembler
from xrunner.rank.compute import Compute
from xrunner.rank.running import RunningRequest
from xrunner.rank.token_mask import mask_without

META = torch.device("meta")


class Nowhere:
    """A GPU whose tensors have no data."""

    device = META

    def __init__(self):
        self.there, self.back, self.waited = [], [], 0

    def pinned(self, count):
        return torch.zeros(count, dtype=torch.uint8)

    def copy(self, target, source):
        (self.back if source.device == META else self.there).append(source.nbytes)

    def moment(self):
        return self

    def synchronize(self):
        self.waited += 1

    def begin_graphs(self):
        pass

    def capture(self, compute):
        compute()
        return compute


class Watching(TorchDispatchMode):
    """Fails where a tensor of the device is read on the host, or one of the host's is brought there."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name, inputs = function.__name__, {t.device for t in args if isinstance(t, torch.Tensor)}
        out = function(*args, **kwargs)
        outputs = {out.device} if isinstance(out, torch.Tensor) else set()
        assert not name.startswith(("_local_scalar_dense", "nonzero", "is_nonzero", "equal")), name
        if name.startswith(("copy_", "_to_copy")):
            assert len(inputs | outputs) == 1, f"{name} between {inputs | outputs}"
        return out


@pytest.fixture
def launched(monkeypatch):
    """The names of the Triton kernels that are launched, and not run."""
    names = []
    monkeypatch.setattr(gpu_device, "on_gpu", lambda x: x.device == META)
    launch = lambda self, grid: lambda *args, **kwargs: names.append(self.__name__)  # noqa: E731
    monkeypatch.setattr(KernelInterface, "__getitem__", launch)
    return names


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for arch in ("llama", "gpt2", "t5"):
        create_model(root / arch, arch, seed=2, **cells.SIZES)
    return {arch: load_model(root / arch, device=META) for arch in ("llama", "gpt2", "t5")}


def device_batch(model, encode, decode, **options):
    """A device batch that encodes prompts of these lengths, and decodes after others."""
    lengths = [(n, 9) for n in [*encode, *decode]]
    running = {}
    if model.start:
        options = options | {"prompt_logprobs": False}
    for index, request in enumerate(requests(lengths, **options)):
        sequence = Sequence(index, len(request.prompt_ids), 9, 0.0)
        sequence.blocks = list(range(6 * index, 6 * index + 6))
        prompt = np.array(request.prompt_ids, dtype=np.int64)
        running[index] = RunningRequest(request, sequence, prompt, start=model.start)
        if running[index].penalised:
            running[index].slot = index
        if request.min_tokens:
            running[index].without_stops = mask_without([0], 300)
    ordered, assemble = [request.sequence for request in running.values()], Assembler(running, 16)
    begun = ordered[len(encode) :]
    if begun:
        assemble(MicroBatch(0, [(sequence, sequence.input_tokens) for sequence in begun], ()))
    for sequence in begun:
        sequence.cached, sequence.generated = sequence.input_tokens, 1
        running[sequence.index].output.append(5)
    batch = MicroBatch(0, [(sequence, sequence.input_tokens) for sequence in ordered[: len(encode)]], begun)
    return assemble(batch)[0]


EDITS = {"frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": ((7, 1.0),), "min_tokens": 4}
EDITED = EDITS | {"temperature": 0.8, "min_p": 0.1, "logprobs": 3, "prompt_logprobs": True}
HOW = ({}, {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3}, EDITED)


@pytest.mark.parametrize("arch", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize(("encode", "decode"), [((7, 40), ()), ((), (3, 9, 30)), ((90,), (12,))])
@pytest.mark.parametrize("how", HOW, ids=["greedy", "sampled", "edited"])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_step_waits_for_its_tokens_alone(models, launched, arch, encode, decode, how, graphs):
    model, gpu = models[arch], Nowhere()
    compute = Compute(model, model.new_cache(41, 16), True, gpu, graphs)
    if graphs:
        compute.graphs.capture(3, 6, 128, 2, 1)
    batch = device_batch(model, encode, decode, **how)
    gpu.there.clear()
    launched.clear()
    with Watching():
        _, tokens = compute(batch, None)
    assert gpu.waited == 1 and tokens.shape == (batch.result_size - 1,) and tokens.dtype == torch.int64
    assert (batch.result_size > 1 + batch.new_tokens) == (how is EDITED and batch.new_tokens > 0)
    replayed = graphs and (batch.phase == "decode" or arch != "t5")
    sampled = replayed and bool(how or (not batch.new_tokens and batch.sampling_arrays))
    assert len(gpu.there) == 1 + replayed + sampled and len(gpu.back) == (batch.result_size > 1)
    attended = {name for phase, name in ((encode, "_attend_prefill"), (decode, "_attend_decode")) if phase}
    assert attended | {"_norm"} <= set(launched) and {"_rotate", "_write"} & set(launched)
    assert ("_sample" in launched) == bool(how and batch.new_tokens)
    assert ("_edit" in launched) == (how is EDITED and batch.new_tokens > 0)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_step_that_takes_tokens_from_the_device_is_launched_without_waiting(models, launched, graphs):
    model, gpu = models["llama"], Nowhere()
    compute = Compute(model, model.new_cache(41, 16), True, gpu, graphs)
    if graphs:
        compute.graphs.capture(3, 6)
    batch = device_batch(model, (), (3, 9, 30))
    compute(batch, None)
    gpu.there.clear()
    waited = gpu.waited
    fed = np.array([0, 2]), np.array([2, 1])
    with Watching():
        running = compute.launch(dataclasses.replace(batch, fed=fed), None)
    assert gpu.waited == waited and running.moment is gpu and running.tokens.shape == (3,)
    assert len(gpu.there) == 2  # the batch, and where to take tokens from


@pytest.mark.parametrize("read", [torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.numpy, torch.Tensor.cpu, bool])
def test_a_step_that_reads_is_found(models, launched, monkeypatch, read):
    model = models["llama"]
    real = type(model).next_tokens
    monkeypatch.setattr(type(model), "next_tokens", lambda self, x, batch: (read(x[0, 0]), real(self, x, batch))[1])
    with pytest.raises((RuntimeError, TypeError), match=r"meta (tensor|device)"), Watching():  # which holds no data
        Compute(model, model.new_cache(41, 16), True, Nowhere())(device_batch(model, (5,), ()), None)


def test_a_step_that_sends_more_is_found(models, launched, monkeypatch):
    model = models["llama"]
    real = type(model).next_tokens
    more = lambda self, x, batch: (torch.arange(3).to(META), real(self, x, batch))[1]  # noqa: E731
    monkeypatch.setattr(type(model), "next_tokens", more)
    with pytest.raises(AssertionError, match="between"), Watching():
        Compute(model, model.new_cache(41, 16), True, Nowhere())(device_batch(model, (5,), ()), None)
