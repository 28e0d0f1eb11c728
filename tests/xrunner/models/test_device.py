"""Models on a device: weights go straight there, and the layers' Triton kernels give what the CPU's give."""

import json
import platform
import subprocess
import sys

import pytest
import torch

from exegpt.kernels import gpu_device
from tests.kernels.gpu import DEVICE, needs_triton
from xcore.errors import InputError
from xrunner.models import Batch, load_model
from xrunner.models.device import CPU, find_device, free_memory
from xrunner.models.weights import DTYPES

from .conftest import ARCHITECTURES
from .test_decoder import IDS, logits, prompt_batch, theirs

META = torch.device("meta")


def tensors(of, seen=None):
    """All tensors that an object holds."""
    seen = set() if seen is None else seen
    if isinstance(of, torch.Tensor):
        return [of]
    if id(of) in seen or isinstance(of, type) or (callable(of) and not hasattr(of, "weight")):
        return []
    seen.add(id(of))
    inner = of if isinstance(of, list | tuple) else of.values() if isinstance(of, dict) else vars(of).values()
    return [
        t
        for tensor in inner
        if isinstance(tensor, list | tuple | dict) or hasattr(tensor, "__dict__")
        for t in tensors(tensor, seen)
    ]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tensor_is_loaded_onto_the_device(directories, arch, dtype):
    on_meta, on_cpu = load_model(directories[arch], dtype, device=META), load_model(directories[arch], dtype)
    meta_tensors = tensors([*on_meta.layers, on_meta.ends, on_meta.new_cache(3, 16)])
    assert len(meta_tensors) > 20 and {tensor.device for tensor in meta_tensors} == {META}
    wide = {t.dtype for t in meta_tensors} - {DTYPES[dtype]}
    assert wide <= {torch.float32}  # the rotary tables
    assert on_meta.device == META and on_cpu.device == CPU


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_float16_follows(directories, arch):
    mine, expected = logits(load_model(directories[arch], "fp16"), IDS).float(), theirs(directories[arch], IDS)
    assert (mine - expected).std() < 0.01 * expected.std()


@needs_triton
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_kernels_of_a_gpu_give_the_same_logits(directories, arch, monkeypatch):
    """A prompt of eleven tokens in two chunks, then one that is decoded."""
    ids, chunks = IDS[:12], (7, 4, None)
    expected = logits(load_model(directories[arch]), ids, chunks)
    if DEVICE == CPU:
        monkeypatch.setattr(gpu_device, "on_gpu", lambda x: True)
    model = load_model(directories[arch], device=DEVICE)
    cache, out, past = model.new_cache(9, 16), [], 0
    for chunk in (7, 4, 1):
        batch = sent(prompt_batch(ids[past : past + chunk], past, [7, 2], 16))
        with torch.inference_mode():
            out.append(model.ends.logits(model.forward(batch, cache)).cpu())
        past += chunk
    torch.testing.assert_close(torch.cat(out), expected, atol=5e-5, rtol=1e-4)


def sent(batch):
    """A decoder-only model's batch on the tests' device."""
    (part,) = batch.attention
    moved = type(part)(part.begin, part.end, *(t.to(DEVICE) for t in (part.tables, part.offsets, part.contexts)))
    return Batch(*(t.to(DEVICE) for t in (batch.tokens, batch.positions, batch.slots)), (moved,), None)


def test_devices_are_found():
    assert find_device("cpu") == CPU and free_memory(CPU) > 2**20
    with pytest.raises(InputError, match="'tpu'"):
        find_device("tpu")


def test_a_gpu_is_taken_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(device.index))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    assert [find_device(None, local) for local in range(3)] == [torch.device("cuda", i) for i in (0, 1, 0)]
    assert current == [0, 1, 0] and find_device("cpu") == CPU


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device() == CPU
    with pytest.raises(InputError, match=r"needs a GPU, and torch sees none.*--device cpu"):
        find_device("cuda")


LOADED = """
import json, os, resource, sys, torch
from pathlib import Path
from xcore.frozen_heap import imports
with imports():
    from xrunner.models import create, load_model
    from xrunner.rank import warm_up
sizes = {"hidden": 64, "heads": 2, "kv_heads": 1, "ffn": 96, "vocab": 300, "context": 256}
create.create_model(Path(sys.argv[1]), "llama", layers=1, **sizes)
torch.set_num_threads(1)
model = load_model(sys.argv[1])

def faults(number, mib):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    activations = [torch.ones(mib * 2**18) for _ in range(number)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def again_and_again():
    return [faults(8, 40) for _ in range(12)]

def touched():
    warm_up._touch_activations(model, 80_000)
    return [faults(5, 20)]

def untouched():
    return [faults(5, 20)]

for measured in (touched, untouched):
    if not os.fork():
        print(json.dumps({measured.__name__: measured()}), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
print(json.dumps({"again_and_again": again_and_again()}))  # here: in a fork, its heap is laid out differently
"""


@pytest.fixture(scope="module")
def page_faults(tmp_path_factory):
    """Numbers of page faults by what is measured, in processes that have loaded a model: two are forks of the third."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("this system's C library isn't glibc")
    program = [sys.executable, "-c", LOADED, str(tmp_path_factory.mktemp("loaded") / "model")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return {name: numbers for line in done.stdout.splitlines() for name, numbers in json.loads(line).items()}


def test_memory_that_an_iteration_frees_is_there_for_the_next_one(page_faults):
    """Page faults of eight activations of 40 MiB (10,240 pages each), twelve times over, in a process that has loaded a
    model. By default glibc returns them: 82,000 faults each time.
    """
    first, *later = page_faults["again_and_again"]
    assert first > 8 * 10000 and sum(later) < 4 * 10240


def test_the_first_prefill_finds_mapped_memory(page_faults):
    """Its 80,000 rows have 20 MiB of states: four such tensors and the queries, keys and values, 5,120 pages each."""
    (touched,), (untouched,) = page_faults["touched"], page_faults["untouched"]
    assert untouched > 5 * 5000 and touched < 5120
