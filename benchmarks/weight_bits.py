"""Weights of 8 and 4 bits beside float32 on this CPU: resident memory, decoding, prefill, and the logits' errors.

The model is quantised as by `exegpt model quantize` to a temporary directory. Iterations of the three models take
turns, and a ratio is the median of the turns' ratios: load from elsewhere meets all three alike.

    python -m benchmarks.weight_bits
    python -m benchmarks.weight_bits --wide       # a billion random parameters
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from exegpt.api.demo import create_demo_model
from exegpt.kernels.linear import PackedLinear
from exegpt.kernels.quantized_linear import GatedLinear, QuantizedLinear
from xcore.console import output
from xrunner.models import Model, load_model
from xrunner.models.create import create_model
from xrunner.models.quantize import quantize_model
from xrunner.rank.warm_up import alike

_DTYPES = {8: "w8a32", 4: "w4a32"}
_BATCHES = (1, 4, 16, 64)
_CONTEXT = 128
_PREFILLED = 256
_RESIDENT = """
import os, sys
from xrunner.models import load_model
from xrunner.models.device import free_memory, CPU
from exegpt.kernels import quantized_cpu
def resident():
    free_memory(CPU)
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = resident()
model = load_model(sys.argv[1], sys.argv[2])
print(resident() - before)
"""


def resident_bytes(directory: Path, dtype: str) -> int:
    """Return the memory that a new process holds more after it has loaded a model."""
    command = [sys.executable, "-c", _RESIDENT, str(directory), dtype]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def weight_bytes(model: Model) -> int:
    """Return the bytes of a model's tensors."""
    layers = [layer for part in (*model.layers, model.ends) for layer in vars(part).values()]
    total = 0
    for layer in layers:
        layer = layer.layer if isinstance(layer, GatedLinear) else layer
        if isinstance(layer, QuantizedLinear | PackedLinear):
            total += layer.weight_bytes
        elif isinstance(layer, torch.Tensor):
            total += layer.nbytes
    return total


def in_turns(calls: Sequence[Callable[[], object]], times: int) -> list[list[float]]:
    """Return the seconds of each call in each turn."""
    seconds: list[list[float]] = [[] for _ in calls]
    for turn in range(times + 1):
        for own, call in zip(seconds, calls, strict=True):
            began = time.perf_counter()
            call()
            if turn:
                own.append(time.perf_counter() - began)
    return seconds


def iteration(model: Model, sequences: int, new: int, context: int) -> Callable[[], object]:
    """Return a call of one iteration of the whole model, with the head and the greedy choice."""
    cache = model.new_cache(-(-context // 16), 16)
    batch = alike(sequences, new, context, 16, None, 1, model.device)
    batch = replace(batch, tokens=torch.randint(model.spec.vocab, batch.tokens.shape))
    last = replace(batch, rows=torch.arange(new - 1, sequences * new, new))
    return lambda: model.step(last, cache)


def show_speed(models: dict[str, Model], times: int) -> None:
    """Print tokens/s in float32, and the ratios of the others to it."""
    rows = []
    cases = [(f"decoding, {n} sequences", n, 1, _CONTEXT) for n in _BATCHES]
    for name, sequences, new, context in [*cases, (f"prefill of {_PREFILLED} tokens", 1, _PREFILLED, _PREFILLED)]:
        seconds = in_turns([iteration(model, sequences, new, context) for model in models.values()], times)
        ratios = [statistics.median(a / b for a, b in zip(seconds[0], own, strict=True)) for own in seconds[1:]]
        rate = sequences * new / statistics.median(seconds[0])
        rows.append([name, f"{rate:,.0f}", *(f"{ratio:.2f}" for ratio in ratios)])
    output.table(["iterations", "float32, tokens/s", *(f"{name} over it" for name in list(models)[1:])], rows)


@torch.inference_mode()
def show_errors(models: dict[str, Model], prompts: int) -> None:
    """Print each model's logit errors to float32's, in deviations of these, and the share of equal greedy tokens."""
    generator, rows = torch.Generator().manual_seed(0), []
    batches = []
    for _ in range(prompts):
        length = int(torch.randint(2, 32, (1,), generator=generator))
        tokens = torch.randint(models["float32"].spec.vocab, (length,), generator=generator)
        batches.append(replace(alike(1, length, length, 16, None, 1, models["float32"].device), tokens=tokens))
    logits = {}
    for name, model in models.items():
        cache = model.new_cache(2, 16)
        logits[name] = torch.cat([model.ends.logits(model.forward(batch, cache)[-1:]) for batch in batches])
    exact = logits.pop("float32")
    for name, own in logits.items():
        error, scale = (own - exact).abs(), exact.std()
        equal = (own.argmax(1) == exact.argmax(1)).float().mean()
        rows.append([name, f"{error.mean() / scale:.4f}", f"{error.max() / scale:.3f}", f"{equal:.1%}"])
    output.table(["weights", "mean error", "greatest error", "equal greedy tokens"], rows, f"{prompts} prompts")


def main(argv: list[str]) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a float32 directory; default: the demo's model in exegpt-demo/")
    parser.add_argument("--wide", action="store_true", help="a model of a billion parameters instead, in exegpt-demo/")
    parser.add_argument("--group-size", type=int, default=128, help="inputs that share a scale (128)")
    parser.add_argument("--head", action="store_true", help="quantise the output head too")
    parser.add_argument("--times", type=int, default=15, help="turns of each iteration (15)")
    parser.add_argument("--prompts", type=int, default=200, help="prompts whose logits are compared (200)")
    options = parser.parse_args(argv)
    original = options.model or Path("exegpt-demo") / "model-wide"
    if options.wide and not original.is_dir():
        create_model(original, layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192)
    elif options.model is None and not options.wide:
        original = create_demo_model(Path("exegpt-demo"), 0)
    with tempfile.TemporaryDirectory(dir=original.parent) as folder:
        directories = {"float32": (original, "fp32")}
        for bits, dtype in _DTYPES.items():
            quantize_model(original, Path(folder) / f"int{bits}", bits, options.group_size, options.head)
            directories[f"int{bits}"] = Path(folder) / f"int{bits}", dtype
        held = {name: resident_bytes(*where) for name, where in directories.items()}
        models = {name: load_model(*where) for name, where in directories.items()}
        rows = []
        for name, model in models.items():
            pairs = (weight_bytes(model), weight_bytes(models["float32"])), (held[name], held["float32"])
            rows.append([name, *(text for a, b in pairs for text in (f"{a / 2**20:,.0f} MiB", f"{a / b:.2f}"))])
        output.table(["weights", "tensors", "over float32's", "resident after loading", "over float32's"], rows)
        spec = models["float32"].spec
        outer = spec.embedding_parameters + (0 if options.head else spec.head_parameters)
        print(
            f"the embedding{'' if options.head else ' and the head'} stay in float32: {outer / spec.parameters:.0%} of "
            f"{spec.parameters:,} parameters"
        )
        show_speed(models, options.times)
        show_errors(models, options.prompts)


if __name__ == "__main__":
    main(sys.argv[1:])
