"""The kernels that one layer launches on a GPU for a decoding iteration: `python -m benchmarks.launches`, without one.

Layers work on tensors without data. Triton's kernels are named where they would be launched, PyTorch's operators where
they would compute. Where cuBLAS cuts a product by its inputs, it may add one that can't be seen from here.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from exegpt.kernels import gpu_device
from xcore.specs.builtin_models import builtin_model
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import BLOCK_SIZE
from xrunner.core import engine
from xrunner.models import Dealing, model_loading, random_model
from xrunner.rank.warm_up import alike

META = torch.device("meta")
MODELS = "llama-3.1-8b", "mistral-7b", "qwen2.5-7b", "qwen3-8b", "opt-13b", "gpt2-xl", "t5-11b"


class Weightless:
    """Takes the place of random weights: shapes alone."""

    def __init__(self, dtype: torch.dtype, seed: int, device: torch.device, bits: int | None):
        self.dtype, self.device = dtype, device

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    matrix = get

    def __contains__(self, name: str) -> bool:
        return False


class _Operators(TorchDispatchMode):
    """Names PyTorch's operators that write something, and copies of addends that aren't overwritten."""

    def __init__(self, names: list[str]):
        TorchDispatchMode.__init__(self)
        self.names = names

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name, returned = function._schema.name.removeprefix("aten::"), function._schema.returns
        view = any(argument.alias_info and not argument.alias_info.is_write for argument in returned)
        if isinstance(out, torch.Tensor) and out.numel() and not view and not name.startswith(("empty", "new_empty")):
            self.names += ["copy"] * (name == "addmm" and args[0].dim() == 2) + [name]
        return out


@contextlib.contextmanager
def on_no_device() -> Iterator[list[str]]:
    """Within it tensors without data count as a GPU's, whose Triton kernels are named here and not run."""
    from triton.runtime.jit import KernelInterface

    names: list[str] = []
    launch = lambda kernel, grid: lambda *args, **options: names.append(kernel.fn.__name__)  # noqa: E731
    with (
        mock.patch.object(gpu_device, "on_gpu", lambda x: x.device == META),
        mock.patch.object(KernelInterface, "__getitem__", launch),
        mock.patch.object(model_loading, "RandomWeights", Weightless),
        mock.patch.object(engine, "check_logits", lambda *arguments: {}),  # there are none
    ):
        yield names


def launches(spec: ModelSpec, sequences: int, context: int) -> list[str]:
    """What one layer launches to decode so many sequences of so many tokens, in order."""
    with on_no_device() as names:
        model = random_model(spec, 1, "bf16", device=META)
        start = 1 if spec.encoder_layers else None
        cache = model.new_cache(-(-context // BLOCK_SIZE), BLOCK_SIZE)
        batch = alike(sequences, 1, context, BLOCK_SIZE, start, 0, META, Dealing.of(model, cache))
        x = torch.empty(sequences, spec.hidden, dtype=torch.bfloat16, device=META)
        with _Operators(names):
            model.forward(batch, cache, x)
        return names


def main() -> int:
    """Print every architecture's launches."""
    print("Kernels of one layer that decodes 64 sequences of 1,024 tokens")
    for name in MODELS:
        names = launches(builtin_model(name), 64, 1024)
        print(f"{name:12} {len(names):2}: {', '.join(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
