"""The sizes of the models with random weights that benchmarks write and run."""

from dataclasses import dataclass
from pathlib import Path

from xrunner.models.create import create_model


@dataclass(frozen=True)
class ModelSizes:
    """A decoder's sizes."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    context: int
    kv_heads: int | None = None
    """None: as many as `heads`."""

    def create(self, directory: Path, seed: int, arch: str = "llama", dtype: str = "fp32") -> None:
        """Write a model of these sizes with random weights."""
        create_model(
            directory,
            arch,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            ffn=self.ffn,
            vocab=self.vocab,
            context=self.context,
            dtype=dtype,
            seed=seed,
        )


TINY = ModelSizes(1, 32, 2, 48, 300, 64)
"""A model whose kernels Triton's interpreter runs in seconds."""
