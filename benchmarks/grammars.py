"""Compiling grammars: milliseconds for JSON schemas of several sizes, and for how long another thread is kept from
running meanwhile: at most so long does an iteration of the engine wait.

    python -m benchmarks.grammars                   # a tokenizer of 128,000 random tokens
    python -m benchmarks.grammars --model DIR
"""

import argparse
import json
import random
import statistics
import string
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.model_sizes import ModelSizes
from xcore.requests.grammar import Grammars

_NAP_S = 5e-4
_EOS = 256
_KINDS: tuple[dict[str, object], ...] = (
    {"type": "string", "maxLength": 100},
    {"type": "integer", "minimum": 0, "maximum": 100_000},
    {"enum": [f"value {i}" for i in range(8)]},
    {"type": "array", "items": {"type": "string", "format": "date-time"}, "maxItems": 20},
    {"type": "number", "minimum": -1.5, "maximum": 2.5},
    {"type": "string", "pattern": "^[A-Z]{2}[0-9]{4,8}$"},
)


def schema(properties: int, name: str) -> str:
    """A schema of so many properties in groups of ten, three levels deep; half of them are required."""
    groups = {}
    for first in range(0, properties, 10):
        fields = {f"{name}_{i}": _KINDS[i % len(_KINDS)] for i in range(first, min(first + 10, properties))}
        group = {"type": "object", "properties": fields, "required": list(fields)[::2], "additionalProperties": False}
        inner = {"type": "object", "properties": {"fields": group}, "required": ["fields"]}
        groups[f"group_{first}"] = inner | {"additionalProperties": False}
    return json.dumps({"type": "object", "properties": groups, "required": list(groups)[::2]})


def random_tokenizer(directory: Path, tokens: int) -> None:
    """A model directory whose tokenizer has so many tokens: bytes, then random words."""
    ModelSizes(1, 32, 2, 64, 300, 64, kv_heads=1).create(directory, seed=0)
    path, draw = directory / "tokenizer.json", random.Random(0)
    document = json.loads(path.read_text(encoding="utf-8"))
    words = dict.fromkeys(document["model"]["vocab"])
    while len(words) < tokens:
        words["".join(draw.choices(string.ascii_lowercase + '_":{}', k=draw.randint(2, 8)))] = None
    document["model"]["vocab"] = {word: i + (i >= _EOS) for i, word in enumerate(words)}
    path.write_text(json.dumps(document), encoding="utf-8")


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds that some work takes in a thread, and the longest for which this one didn't run meanwhile."""
    seconds: list[float] = []

    def run() -> None:
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)

    thread, longest, last = threading.Thread(target=run), 0.0, time.perf_counter()
    thread.start()
    while thread.is_alive():
        time.sleep(_NAP_S)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return seconds[0], longest


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a directory with a tokenizer.json and a config.json")
    parser.add_argument("--tokens", type=int, default=128_000, help="of the random tokenizer")
    parser.add_argument("--runs", type=int, default=5)
    typed = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = typed.model or Path(directory) / "model"
        if typed.model is None:
            random_tokenizer(model, typed.tokens)
        vocab = max(json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"].values()) + 1
        grammars = Grammars(model / "tokenizer.json", frozenset({_EOS}), vocab)
        rows = [("the tokenizer, once", [timed(grammars.prepare)])]
        for properties in (10, 50, 200, 1000):
            texts = [schema(properties, f"field{run}") for run in range(typed.runs)]
            rows.append((f"{properties} properties", [timed(partial(grammars.compile, text)) for text in texts]))
    print(f"{'milliseconds, medians':24}{'takes':>10}{'keeps others':>14}")
    for name, runs in rows:
        took, kept = (1e3 * statistics.median(column) for column in zip(*runs, strict=True))
        print(f"{name:24}{took:10.1f}{kept:14.1f}")


if __name__ == "__main__":
    main()
