"""Examples to train a ranker on: prompts with the lengths of their outputs, split by prompt."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from xcore.document import parse_json, read_lines
from xcore.errors import InputError
from xcore.orders.features import Features

Part = Literal["train", "validation", "test"]
_LEAST = 20
"""Minimum number of examples in a file; fewer don't allow a split."""


@dataclass(frozen=True)
class Example:
    """A prompt and the length of its output."""

    prompt: str
    output_tokens: int
    kind: str = ""
    """The kind of prompt, if the file names it."""

    @property
    def part(self) -> Part:
        """The example's part by a hash of its prompt: training (70 %), validation (15 %) or test (15 %).

        The same prompt is never in two parts.
        """
        place = zlib.crc32(self.prompt.strip().encode("utf-8", "replace")) % 100
        return "train" if place < 70 else "validation" if place < 85 else "test"


def read_examples(path: Path) -> list[Example]:
    """Read the examples of a JSONL file with `prompt`, `output_tokens` and optionally `kind`.

    Raises InputError with the number of an invalid line.
    """
    examples = []
    for number, line in enumerate(read_lines(path, "file of prompts"), 1):
        if not line.strip():
            continue
        where = f"'{path}', line {number}"
        entry = parse_json(line, where)
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise InputError(f"{where} has no prompt: write an object with prompt and output_tokens.")
        tokens = entry.get("output_tokens")
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise InputError(f"{where} has output_tokens = {tokens!r}: it must be a whole number of at least 1.")
        examples.append(Example(entry["prompt"], tokens, str(entry.get("kind", ""))))
    if len(examples) < _LEAST:
        raise InputError(f"'{path}' has {len(examples)} prompts: a ranker needs at least {_LEAST}.")
    return examples


def arrays(examples: Sequence[Example]) -> tuple[Features, NDArray[np.int64]]:
    """Return features and lengths [n]; InputError if all outputs are equally long."""
    lengths = np.array([example.output_tokens for example in examples], dtype=np.int64)
    if len(set(lengths.tolist())) < 2:
        raise InputError("All prompts for training have outputs of the same length: add prompts with other lengths.")
    return Features.of([example.prompt for example in examples]), lengths


def of_part(examples: Sequence[Example], *parts: Part) -> list[Example]:
    """Return the examples of some parts."""
    return [example for example in examples if example.part in parts]
