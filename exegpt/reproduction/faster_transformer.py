"""FasterTransformer, the paper's baseline (section 7.1; docs/theory.md), and the latency bounds derived from it.

Batches are static. Tensor parallelism covers a node's devices, and a pipeline covers the nodes with as many
micro-batches as stages. There is no early termination and no padding of inputs. Memory is reserved for the greatest
lengths.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from exegpt.reproduction.setup import Setup
from xcore.errors import InputError
from xcore.specs.schedule import BLOCK_SIZE
from xscheduler.allocation import uniform_stages
from xsimulator.steady import static
from xsimulator.steady.outcome import Outcome
from xsimulator.steady.scenario import Scenario

STEP = 4
"""Step between batch sizes."""
PERCENTILES = (10, 30, 70)
"""Percentiles of the latencies over all batch sizes, which are the bounds in addition to infinity."""


@dataclass(frozen=True)
class StaticBatch:
    """Latency and throughput at one batch size."""

    batch: int
    latency_s: float
    """Latency for the greatest output length."""
    throughput_seq_s: float
    """Throughput for the mean of a batch's longest output."""


def static_batches(setup: Setup, of: Callable[[Scenario, int], Outcome] = static.outcome) -> tuple[StaticBatch, ...]:
    """Return all batch sizes within memory, in rising order; iterations as in the paper, D(S) = S.

    `of` is the steady state of a batch size.

    Raises InputError if even the smallest exceeds memory.
    """
    stages = uniform_stages(setup.model, setup.cluster, setup.cluster.devices_per_node)
    scenario = setup.scenario(stages, form="paper")
    workload = setup.workload
    blocks = -(-(workload.input.max + workload.output.max) // BLOCK_SIZE)
    batches: list[StaticBatch] = []
    while True:
        batch = STEP * (len(batches) + 1)
        outcome = of(scenario, batch)
        if scenario.replica.room(outcome.demand.step) < batch * blocks:
            break
        latency = float(outcome.lifetime(np.array([float(workload.output.max)])).seconds[0])
        batches.append(StaticBatch(batch, latency, outcome.throughput))
    if not batches:
        raise InputError(f"FasterTransformer can't hold a batch of {STEP} for {setup.name}: take more devices.")
    return tuple(batches)


def bounds(batches: tuple[StaticBatch, ...]) -> tuple[float | None, ...]:
    """Return the four latency bounds in seconds; None: no bound."""
    latencies = [batch.latency_s for batch in batches]
    return (*(float(np.percentile(latencies, q)) for q in PERCENTILES), None)


def best_under(batches: tuple[StaticBatch, ...], bound_s: float | None) -> StaticBatch:
    """Return the batch of highest throughput within a bound; the smallest batch must meet it."""
    meeting = [batch for batch in batches if bound_s is None or batch.latency_s <= bound_s]
    return max(meeting, key=lambda batch: batch.throughput_seq_s)
