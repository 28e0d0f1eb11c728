"""Train rankers: by ListMLE over batches of prompts, and as a classifier of length buckets for comparison."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from xcore.orders.features import BUCKETS, DENSE, Features
from xcore.orders.ranker import Ranker

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A loss of outputs [batch, outputs] and targets [batch]."""


@dataclass(frozen=True)
class Recipe:
    """The hyperparameters of training.

    The defaults were chosen on the validation part of `docs/multimodel.md`'s data.
    """

    width: int = 32
    """Width of the embeddings."""
    hidden: int = 64
    batch: int = 64
    epochs: int = 16
    learning_rate: float = 2e-3
    dropout: float = 0.6
    """Share of a prompt's words that are left out in a batch."""
    seed: int = 0


def train_ranker(features: Features, lengths: NDArray[np.int64], recipe: Recipe) -> Ranker:
    """Train a ranker by ListMLE: the likelihood of the true order of a batch's lengths, shortest first."""
    return _train(features, torch.as_tensor(lengths, dtype=torch.float32), recipe, 1, list_mle)


def train_classifier(features: Features, lengths: NDArray[np.int64], recipe: Recipe, buckets: int = 10) -> Ranker:
    """Train a classifier by cross entropy, with length buckets that hold equally many of the lengths."""
    edges = np.quantile(lengths, np.arange(1, buckets) / buckets)
    target = torch.as_tensor(np.searchsorted(edges, lengths, side="left"), dtype=torch.long)
    return _train(features, target, recipe, buckets, functional.cross_entropy)


def list_mle(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the negative log-likelihood per prompt of the order by length (Plackett-Luce); scores [batch, 1]."""
    ordered = scores[torch.argsort(lengths, stable=True), 0]
    rest = torch.logcumsumexp(ordered.flip(0), 0).flip(0)
    return (rest - ordered).mean()


def _train(features: Features, targets: torch.Tensor, recipe: Recipe, outputs: int, loss: Loss) -> Ranker:
    generator = torch.Generator().manual_seed(recipe.seed)
    parameters = _parameters(recipe, outputs, generator)
    optimiser = torch.optim.Adam(parameters, recipe.learning_rate)
    batches = max(1, len(features) // recipe.batch)
    steps = recipe.epochs * batches
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / steps))
    for _ in range(recipe.epochs):
        shuffled = torch.randperm(len(features), generator=generator)
        for rows in torch.tensor_split(shuffled, batches):
            result = _forward(parameters, features.rows(rows.numpy()), recipe.dropout, generator)
            optimiser.zero_grad()
            loss(result, targets[rows]).backward()
            optimiser.step()
            schedule.step()
    return Ranker(*(part.detach().numpy() for part in parameters))


def _parameters(recipe: Recipe, outputs: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Return random parameters for a `Ranker`."""
    inputs = recipe.width + DENSE

    def normal(scale: float, *shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).requires_grad_()

    return [
        normal(0.02, BUCKETS, recipe.width),
        normal(inputs**-0.5, inputs, recipe.hidden),
        normal(0.0, recipe.hidden),
        normal(recipe.hidden**-0.5, recipe.hidden, outputs),
        normal(0.0, outputs),
    ]


def _forward(
    parameters: list[torch.Tensor], features: Features, dropout: float, generator: torch.Generator
) -> torch.Tensor:
    """Compute the outputs as `Ranker.outputs` does, with words left out at random."""
    embedding, first, first_bias, last, last_bias = parameters
    keep = (torch.rand(len(features.buckets), generator=generator) >= dropout).float() / (1 - dropout)
    counts = torch.as_tensor(np.maximum(np.diff(features.starts), 1), dtype=torch.float32)
    summed = functional.embedding_bag(
        torch.as_tensor(features.buckets),
        embedding,
        torch.as_tensor(features.starts[:-1]),
        mode="sum",
        per_sample_weights=keep,
    )
    x = torch.cat([summed / counts.sqrt()[:, None], torch.as_tensor(features.dense)], dim=1)
    return torch.relu(x @ first + first_bias) @ last + last_bias
