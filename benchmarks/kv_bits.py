"""Keys and values in int8 beside float32's on this CPU: bytes, decoding speed by context, and the logits' errors.

The model has the sizes of the demo's with a longer context, and random weights. Decoding iterations over both caches
take turns, and a ratio is the median of the turns' ratios: load from elsewhere meets both alike. Errors are those of
the logits after each token of random texts. Greedy tokens are compared after equal texts, so that one difference does
not cause the next.

    python -m benchmarks.kv_bits [--model DIR]
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.weight_bits import in_turns
from xcore.console import output
from xrunner.models import Model, load_model
from xrunner.models.create import create_model
from xrunner.rank.warm_up import alike

_BLOCK = 16


def decoding(model: Model, sequences: int, context: int) -> Callable[[], object]:
    """Return a call of one decoding iteration of the whole model; each sequence has blocks of its own."""
    width = -(-context // _BLOCK)
    cache = model.new_cache(sequences * width, _BLOCK)
    cache.touch(sequences * width)
    batch = alike(sequences, 1, context, _BLOCK, None, width, model.device)
    tables = torch.arange(sequences * width, dtype=torch.int32).view(sequences, width)
    slots = tables[:, -1].long() * _BLOCK + (context - 1) % _BLOCK
    tokens = torch.randint(model.spec.vocab, batch.tokens.shape)
    batch = replace(batch, tokens=tokens, slots=slots, attention=(replace(batch.attention[0], tables=tables),))
    return lambda: model.step(batch, cache)


def show_speed(models: dict[str, Model], sequences: list[int], contexts: list[int], times: int) -> None:
    """Print float32's tokens/s of decoding, int8's over them, and the bytes of both caches."""
    rows = []
    for context in contexts:
        for count in sequences:
            plain, small = in_turns([decoding(model, count, context) for model in models.values()], times)
            ratio = statistics.median(a / b for a, b in zip(plain, small, strict=True))
            held = [m.spec.layers * m.spec.kv_bytes(1, m.kv_dtype) * context * count / 2**20 for m in models.values()]
            rate = count / statistics.median(plain)
            rows.append([f"{context:,}", f"{count}", f"{rate:,.0f}", f"{ratio:.2f}", *(f"{mib:,.1f}" for mib in held)])
    head = ["context", "sequences", "float32, tokens/s", "int8 over it", "cache in float32, MiB", "in int8, MiB"]
    output.table(head, rows, "decoding")


@torch.inference_mode()
def show_errors(models: dict[str, Model], texts: int, length: int) -> None:
    """Print int8's logit errors to float32's, in deviations of these, and the share of equal greedy tokens."""
    generator = torch.Generator().manual_seed(0)
    means, greatest, equal = [], [], []
    for _ in range(texts):
        logits = []
        tokens = torch.randint(models["fp32"].spec.vocab, (length,), generator=generator)
        for model in models.values():
            batch = replace(alike(1, length, length, _BLOCK, None, 1, model.device), tokens=tokens)
            logits.append(model.ends.logits(model.forward(batch, model.new_cache(-(-length // _BLOCK), _BLOCK))))
        exact, ours = logits
        error = (ours - exact).abs() / exact.std()
        means.append(float(error.mean()))
        greatest.append(float(error.max()))
        equal.append(float((ours.argmax(1) == exact.argmax(1)).float().mean()))
    row = [f"{statistics.mean(means):.5f}", f"{max(greatest):.3f}", f"{statistics.mean(equal):.2%}"]
    output.table(["mean error", "greatest error", "equal greedy tokens"], [row], f"{texts} texts of {length:,} tokens")


def main(argv: list[str]) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a directory; default: the demo's sizes, in exegpt-demo/model-kv")
    parser.add_argument("--sequences", default="1,4,16", help="numbers of decoded sequences (1,4,16)")
    parser.add_argument("--contexts", default="256,2048", help="their contexts (256,2048)")
    parser.add_argument("--times", type=int, default=15, help="turns of each iteration (15)")
    parser.add_argument("--texts", type=int, default=8, help="texts whose logits are compared (8)")
    parser.add_argument("--length", type=int, default=512, help="tokens of each text (512)")
    options = parser.parse_args(argv)
    directory = options.model or Path("exegpt-demo") / "model-kv"
    if options.model is None and not directory.is_dir():
        create_model(directory, layers=8, hidden=512, heads=8, kv_heads=4, ffn=1408, vocab=32000, context=4096)
    models = {kv_dtype: load_model(directory, kv_dtype=kv_dtype) for kv_dtype in ("fp32", "int8")}
    sequences, contexts = ([int(n) for n in text.split(",")] for text in (options.sequences, options.contexts))
    show_speed(models, sequences, contexts, options.times)
    show_errors(models, options.texts, options.length)


if __name__ == "__main__":
    main(sys.argv[1:])
