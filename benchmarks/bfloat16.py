"""bfloat16 beside float32 on this CPU: an iteration's parts, and the logits' errors beside transformers' bfloat16.

Times are one thread's CPU time, which other processes hardly change: the least of several, in turns. Errors are
absolute, from the same weights in float64, after prompts of random tokens.

    python -m benchmarks.bfloat16 --prompts 1000
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from exegpt.api.demo import create_demo_model
from xcore.console import output
from xprofiler.attention_probe import AttentionProbe
from xprofiler.passes import head_pass, in_a_row, layer_calls
from xrunner.models import Model, load_model
from xrunner.models.device import CPU
from xrunner.rank.warm_up import alike

_TIMES = 9
_LAYERS = 2
_ROWS = (1, 16, 64, 260, 1028)
_HEAD_ROWS = (1, 16, 64)
_ATTENTION = ((64, 1, 255), (16, 1, 1023), (1, 1, 1023), (4, 128, 0), (1, 256, 256))
"""Sequences, new tokens of each, cached tokens of each."""
_LONGEST = 32
"""Tokens of a prompt at most."""


def least_seconds(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Return the least CPU seconds of each call; they take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(_TIMES + 1):
        for mine, call in zip(times, calls, strict=True):
            began = time.process_time()
            call()
            if turn:
                mine.append(time.process_time() - began)
    return [min(mine) for mine in times]


@torch.inference_mode()
def show_parts(models: list[Model]) -> None:
    """Print the time of each part of an iteration in float32 and bfloat16."""
    most = max(batch for batch, _, _ in _ATTENTION)
    probes = [AttentionProbe(model.share, most, 1024, model.dtype) for model in models]
    parts: list[tuple[str, Sequence[Callable[[], object]]]] = [
        (f"{_LAYERS} layers without attention, {n} rows", [in_a_row(layer_calls(model, n)) for model in models])
        for n in _ROWS
    ]
    parts += [(f"head and greedy choice, {n} rows", [head_pass(model, n) for model in models]) for n in _HEAD_ROWS]
    parts += [
        (f"attention of a layer, {batch} x {new} after {past}", [probe.call(batch, new, past) for probe in probes])
        for batch, new, past in _ATTENTION
    ]
    rows = []
    for name, calls in parts:
        wide, narrow = least_seconds(calls)
        rows.append([name, output.seconds(wide), output.seconds(narrow), f"{narrow / wide:.2f}"])
    output.table(["part", "float32", "bfloat16", "ratio"], rows)


@torch.inference_mode()
def show_errors(directory: Path, model: Model, prompts: int) -> None:
    """Print the errors of the logits after each prompt, ours over those of transformers in bfloat16."""
    from transformers import AutoModelForCausalLM

    reference, exact = (AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16) for _ in range(2))
    exact = exact.double()
    generator, cache = torch.Generator().manual_seed(0), model.new_cache(-(-_LONGEST // 16), 16)
    mine, theirs, equal = [], [], 0
    for _ in range(prompts):
        length = int(torch.randint(2, _LONGEST, (1,), generator=generator))
        tokens = torch.randint(model.spec.vocab, (length,), generator=generator)
        batch = replace(alike(1, length, length, 16, None, 1, CPU), tokens=tokens)
        ours = model.ends.logits(model.forward(batch, cache)[-1:])[0].double()
        plain, right = (m(tokens[None]).logits[0, -1].double() for m in (reference, exact))
        mine.append((ours - right).abs())
        theirs.append((plain - right).abs())
        equal += int(ours.argmax() == plain.argmax())
    ours, plain = torch.stack(mine), torch.stack(theirs)
    print(
        f"logit errors over {prompts:,} prompts, ours over transformers' bfloat16: mean "
        f"{float(ours.mean() / plain.mean()):.3f}, max {float(ours.max() / plain.max()):.3f}; "
        f"equal greedy tokens: {equal:,} of {prompts:,}"
    )


def main(argv: list[str]) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a directory; default: the demo's model in exegpt-demo/")
    parser.add_argument("--prompts", type=int, default=0, help="prompts whose logits are compared; default: none")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    directory = options.model or create_demo_model(Path("exegpt-demo"), 0)
    show_parts([load_model(directory, dtype, _LAYERS) for dtype in ("fp32", "bf16")])
    if options.prompts:
        show_errors(directory, load_model(directory, "bf16"), options.prompts)


if __name__ == "__main__":
    main(sys.argv[1:])
