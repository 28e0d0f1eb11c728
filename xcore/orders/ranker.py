"""Ranker: a prompt's score, the higher the shorter its output is expected to be."""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xcore.errors import InputError
from xcore.orders.features import BUCKETS, DENSE, Features

Array = NDArray[np.float32]
VERSION = 1
_OPTIONAL = "reference"
"""The array that files of earlier versions of exegpt don't have."""


@dataclass(frozen=True)
class Ranker:
    """A small network that scores prompts: a mean of embedded words with the dense features, and one hidden layer.

    It has as many outputs as `last` has columns: one score, or a classifier's logits, bucket by bucket.
    """

    embedding: Array
    """[BUCKETS, width]"""
    first: Array
    """[width + DENSE, hidden]"""
    first_bias: Array
    last: Array
    """[hidden, outputs]"""
    last_bias: Array
    reference: Array = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    """Scores of prompts that it wasn't trained on [prompts]: the scale of its scores. Empty: unknown."""

    def outputs(self, features: Features) -> Array:
        """Compute the outputs [prompts, outputs]."""
        counts = np.maximum(np.diff(features.starts), 1)
        sums = np.zeros((len(features), self.embedding.shape[1]), dtype=np.float32)
        rows = np.repeat(np.arange(len(features)), np.diff(features.starts))
        np.add.at(sums, rows, self.embedding[features.buckets])
        x = np.concatenate([sums / np.sqrt(counts)[:, None].astype(np.float32), features.dense], axis=1)
        hidden = np.maximum(x @ self.first + self.first_bias, 0.0)
        result: Array = hidden @ self.last + self.last_bias
        return result

    def scores(self, prompts: Sequence[str]) -> NDArray[np.float64]:
        """Return scores [prompts]; a high score means a short output.

        A classifier's score is minus the likeliest bucket.
        """
        outputs = self.outputs(Features.of(prompts)).astype(np.float64)
        return outputs[:, 0] if outputs.shape[1] == 1 else -outputs.argmax(axis=1).astype(np.float64)

    def save(self, path: Path) -> None:
        """Write the arrays alone, in NumPy's format."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        try:
            with open(path, "wb") as file:
                np.savez(file, version=np.int64(VERSION), **arrays)
        except OSError as error:
            raise InputError(f"'{path}' can't be written ({error.strerror}): choose another file.") from None

    @staticmethod
    def load(path: Path) -> "Ranker":
        """Read a saved ranker; InputError for another file. Nothing in the file is executed."""
        if not path.is_file():
            raise InputError(f"There is no ranker file '{path}': train one with `exegpt rank train`.")
        try:
            with np.load(path, allow_pickle=False) as archive:
                version = int(archive["version"])
                names = [field.name for field in fields(Ranker) if field.name in archive or field.name != _OPTIONAL]
                arrays = {name: np.asarray(archive[name], dtype=np.float32) for name in names}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            raise InputError(f"'{path}' is not a ranker: train one with `exegpt rank train`.") from None
        ranker = Ranker(**arrays)
        if version != VERSION:
            raise InputError(
                f"'{path}' is a ranker of version {version}, but this version of exegpt reads version {VERSION}: "
                "train it again."
            )
        if not ranker._fits() or not all(np.isfinite(array).all() for array in arrays.values()):
            raise InputError(
                f"'{path}' has arrays with wrong names, shapes or non-finite values: train the ranker again."
            )
        return ranker

    def _fits(self) -> bool:
        """Return whether the shapes of the arrays are consistent."""
        if self.embedding.ndim != 2 or self.first.ndim != 2 or self.last.ndim != 2:
            return False
        inputs, hidden, outputs = self.embedding.shape[1] + DENSE, self.first.shape[1], self.last.shape[1]
        return (
            len(self.embedding) == BUCKETS
            and self.first.shape == (inputs, hidden)
            and self.first_bias.shape == (hidden,)
            and self.last.shape == (hidden, outputs)
            and self.last_bias.shape == (outputs,)
            and self.reference.ndim == 1
        )
