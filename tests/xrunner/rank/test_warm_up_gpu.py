"""The warm-up on a GPU: every form of a kernel that a run launches has been launched before, and so compiled."""

import inspect
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime.jit import KernelInterface

from exegpt.kernels import gpu_device
from exegpt.kernels.attention import attention
from tests.xrunner import cells
from xrunner.models import AttentionArrays, load_model
from xrunner.models.create import create_model
from xrunner.rank import warm_up as warm_up_module
from xrunner.rank.assembly import DeviceBatch
from xrunner.rank.compute import Compute
from xrunner.rank.warm_up import Extent, warm_up

from .test_no_waiting import HOW, META, Nowhere, device_batch

BLOCK = 16


@pytest.fixture
def forms(monkeypatch):
    """The kernels that are launched, by what they are compiled for anew."""
    seen = set()

    def launch(self, grid):
        return lambda *args, **options: seen.add((self.__name__, *kinds(self, args, options)))

    monkeypatch.setattr(gpu_device, "on_gpu", lambda x: x.device == META)
    monkeypatch.setattr(KernelInterface, "__getitem__", launch)
    return seen


def kinds(kernel, args, options):
    """What Triton tells a launch's arguments apart by: tensors by their dtype and by whether they begin at a multiple
    of 16 bytes, integers by their width and by whether they are 1 or a multiple of 16, unless the kernel forbids it;
    constants and options by their values.
    """
    facts = {**vars(kernel), **vars(kernel).get("kwargs", {})}  # where it is interpreted, and where not
    any_integer, anywhere = (facts.get(f"do_not_specialize{what}") or () for what in ("", "_on_alignment"))
    parameters = inspect.signature(kernel.fn).parameters

    def kind(name, value):
        if name not in parameters or parameters[name].annotation is tl.constexpr:
            return repr(value)
        if isinstance(value, torch.Tensor):
            begins = value.storage_offset() * value.element_size()
            return value.dtype, name in anywhere or begins % 16 == 0
        if isinstance(value, int):
            return value >= 2**31, name in any_integer or (value == 1, value % 16 == 0)
        return type(value)

    arguments = dict(zip(parameters, args, strict=False)) | options
    return [(name, kind(name, value)) for name, value in sorted(arguments.items())]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "m"
    create_model(path, "llama", layers=1, hidden=64, heads=4, kv_heads=2, ffn=64, vocab=300, context=20_000)
    return load_model(path, "bf16", device=META)


def batch(lengths, contexts):
    """DeviceBatch on so many new tokens of sequences of these contexts."""
    tokens, width = sum(lengths), -(-max(contexts) // BLOCK)
    none, decodes = np.zeros(tokens, dtype=np.int64), max(lengths) == 1
    tables, offsets = np.zeros((len(lengths), width), dtype=np.int32), np.cumsum([0, *lengths], dtype=np.int32)
    attention = AttentionArrays(0, tokens, tables, offsets, np.array(contexts, dtype=np.int32))
    rows = offsets[1:].astype(np.int64) - 1
    phase = "decode" if decodes else "encode"
    return DeviceBatch(phase, 0, len(lengths), tokens, none, none, none, (attention,), rows, len(lengths))


def extent(most, together, longest):
    """Of runs with so many tokens and prompts in an iteration, and sequences of so many tokens."""
    return Extent(2000, most, 200, -(-longest // BLOCK), together)


SHORT = extent(600, 30, 60)
LONG = extent(4000, 8, 20_000)
MANY = extent(8000, 200, 300)


@pytest.mark.parametrize(
    ("reached", "lengths", "contexts"),
    [
        (SHORT, [1], [9]),
        (SHORT, [1] * 100, [60] * 100),
        (SHORT, [20] * 30, [20] * 30),
        (SHORT, [3, 2, 9], [60, 7, 9]),
        (LONG, [1], [20_000]),
        (LONG, [1], [1500]),
        (LONG, [1] * 3, [9000] * 3),
        (LONG, [1] * 200, [9000] * 200),
        (LONG, [500] * 8, [500] * 8),
        (LONG, [2], [5000]),
        (LONG, [4000], [20_000]),
        (MANY, [40] * 200, [40] * 200),
        (MANY, [7] * 130, [300] * 130),
        (MANY, [2] * 65, [30] * 65),
        (MANY, [100] * 70, [100] * 70),
    ],
)
@pytest.mark.parametrize("graphs", [False, True])
def test_nothing_is_compiled_in_a_run(model, forms, reached, lengths, contexts, graphs):
    cache = model.new_cache(2000, BLOCK)
    compute = Compute(model, cache, True, Nowhere(), graphs)
    warm_up(model, cache, reached, compute.graphs)
    before = set(forms)
    compute(batch(lengths, contexts), None)
    assert not forms - before


@pytest.mark.parametrize("arch", ["gpt2", "mistral", "qwen3", "t5"])
@pytest.mark.parametrize("graphs", [pytest.param(False, marks=pytest.mark.slow), True])
def test_nothing_is_compiled_for_other_architectures(forms, tmp_path, arch, graphs):
    create_model(tmp_path / "m", arch, **cells.SIZES)
    if arch == "mistral":
        config = json.loads((tmp_path / "m/config.json").read_text())
        (tmp_path / "m/config.json").write_text(json.dumps(config | {"sliding_window": 20}))
    model = load_model(tmp_path / "m", "bf16", device=META)
    cache = model.new_cache(80, BLOCK)
    compute = Compute(model, cache, True, Nowhere(), graphs)
    warm_up(model, cache, Extent(79, 150, 12, 6, 8), compute.graphs)
    before = set(forms)
    for encode, decode in [((7, 40), ()), ((), (3, 9, 30)), ((60, 20, 7, 1, 3), (4, 5)), ((), (5,)), ((2, 3), (1,))]:
        for how in HOW:
            compute(device_batch(model, encode, decode, **how), None)
    assert not forms - before


def test_one_kernel_takes_tables_that_begin_anywhere(forms):
    """A profile's are parts of one array."""
    q, out = torch.zeros(2, 1, 4, 16, device=META)
    keys = values = torch.zeros(9, 2, 16, 16, device=META)
    counts = torch.zeros(2, dtype=torch.int32, device=META)
    for table in torch.zeros(3, 3, dtype=torch.int32, device=META).split(1):
        attention(q, keys, values, table, counts, counts[:1], out)
    assert len(forms) == 1


def test_graphs_are_made_first_and_all_is_waited_for(model, forms, monkeypatch):
    """To make one gives back the memory that torch keeps; and what is queued here is no part of the run."""
    order = []
    monkeypatch.setattr(warm_up_module, "_run_once", lambda *given: order.append("run"))
    graphs = SimpleNamespace(capture=lambda *given: order.append("graphs"))
    moment = SimpleNamespace(synchronize=lambda: order.append("waited"))
    warm_up(model, model.new_cache(4, BLOCK), SHORT, graphs, gpu=SimpleNamespace(moment=lambda: moment))
    first, *runs, last = order
    assert (first, last) == ("graphs", "waited") and set(runs) == {"run"}
