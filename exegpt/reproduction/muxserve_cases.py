"""Replay MuxServe's synthetic workloads: published LLMs on meshes, by its strategies."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from xcore.batching.shared_pool import QuotaPool, Store
from xcore.policies.one_phase import OnePhasePolicy
from xcore.policies.sharing import FirstComeSharing, Sharing, SpatialSharing, TimeSharing
from xcore.rows import csv_rows
from xcore.specs.iteration_profile import IterationProfile
from xcore.specs.request_times import RequestTimes
from xcore.specs.workload import RequestLengths
from xmulti.sharing.iteration_cost import TableCost
from xmulti.sharing.replay import ModelLoad, replay_unit

SHAPES = {"llama-7b": (32, 32, 7), "llama-13b": (40, 40, 13), "llama-30b": (60, 52, 30), "llama-65b": (80, 64, 65)}
"""Layers, heads and the billions of parameters in the name; every head has 128 values."""
STRATEGIES: dict[str, Callable[[], Sharing]] = {
    "muxserve": partial(SpatialSharing, overlap=0.2),
    "temporal": FirstComeSharing,
    "spatial": partial(TimeSharing, in_order=False),
}
"""How models share devices, as in MuxServe's configuration; with `spatial` they have dedicated devices."""
PREFILL_SHARES = {"llama-7b": 0.8, "llama-13b": 0.9}
"""Shares of the multiprocessors for prefills under MuxServe; other models' prefills have all."""
BLOCK_TOKENS = 32
PART_BYTES = 2 * 2 * 128 * BLOCK_TOKENS
"""The keys and values of one head of one layer for a block's tokens."""
DEVICE_BYTES = 85.1e9
"""Memory of an A100-80GB, as reported by the driver."""
KV_ALONE = 0.5
"""Cache share of dedicated devices, in MuxServe's configuration."""
OTHER_GB = 7.6
"""Memory of each model on each device besides its weights: activations, and two processes."""
SEQUENCES = 256
"""Maximum sequences that a model decodes at once if no quota limits it."""
INPUT, OUTPUT = (161, 1.5), (337, 1.0)
"""Mean tokens and coefficient of variation of log-normal lengths."""
LONGEST = 1024
DECODE_SHARES = tuple(part / 10 for part in range(3, 10))
SLO_SCALES = (1, 2, 3, 5, 6, 8, 10, 12, 15, 17, 20, 30, 50, 70, 100)
"""Published SLOs, as multiples of a request's latency alone."""
SLO_DEVICES = {"llama-7b": 1, "llama-13b": 1, "llama-30b": 4, "llama-65b": 8}
"""Devices of each model in that latency."""


@dataclass(frozen=True)
class PublishedModel:
    """One LLM of one case, as published."""

    llm: str
    model: str
    rate: float
    mesh: str
    throughput: float
    requests: int
    in_time: tuple[float, ...] = ()
    """Shares of the requests within each of `SLO_SCALES`."""

    @property
    def devices(self) -> int:
        """The number of devices of the model's mesh, or of its dedicated devices."""
        digits = self.mesh.removeprefix("mesh").partition("idx")[0]
        return int(digits)


@dataclass(frozen=True)
class Sums:
    """Requests/s of a case's LLMs: as a plain sum, and weighted by their rates."""

    plain: float
    weighted: float

    @staticmethod
    def of(throughputs: Iterable[tuple[float, float]]) -> "Sums":
        """Sum up pairs of throughput and rate."""
        rows = tuple(throughputs)
        return Sums(sum(tpt for tpt, _ in rows), sum(tpt * rate for tpt, rate in rows))


@dataclass(frozen=True)
class Served:
    """The results of a case's LLMs under a strategy: their sums, and the shares of requests within each SLO scale."""

    sums: Sums
    in_time: tuple[float, ...]

    @staticmethod
    def published(rows: list[PublishedModel]) -> "Served":
        """Return what was measured."""
        requests = sum(row.requests for row in rows)
        weighted = (tuple(row.requests / requests * share for share in row.in_time) for row in rows)
        in_time = tuple(map(sum, zip(*weighted, strict=True)))
        return Served(Sums.of((row.throughput, row.rate) for row in rows), in_time)


def read_measured(folder: Path) -> dict[tuple[str, str], dict[str, list[PublishedModel]]]:
    """Return the published LLMs of every case, by α and scale, then by strategy."""
    cases: dict[tuple[str, str], dict[str, list[PublishedModel]]] = {}
    for row in csv_rows(folder / "e2e_synthetic_per_llm.csv"):
        requests = row.whole("num_requests")
        in_time = tuple(row.whole(f"slo_ok_x{scale}") / requests for scale in SLO_SCALES)
        figures = (row.number("rate"), row["mesh"], row.number("throughput_req_s"), requests, in_time)
        of_case = cases.setdefault((row["alpha"], row["scale"]), {})
        of_case.setdefault(row["strategy"], []).append(PublishedModel(row["llm"], row["model"], *figures))
    return dict(sorted(cases.items()))


def simulate(
    profiles: dict[str, IterationProfile], rows: list[PublishedModel], strategy: str, contention: float
) -> Served:
    """Return a case's results under one strategy."""
    units: dict[str, list[PublishedModel]] = {}
    for row in rows:
        units.setdefault(row.llm if strategy == "spatial" else row.mesh, []).append(row)
    throughputs, over = [], []
    for unit in units.values():
        run = replay_unit(_loads(profiles, unit, strategy), STRATEGIES[strategy](), contention)
        throughputs += [(row.requests / run.served[row.llm][-1].finish_s, row.rate) for row in unit]
        for row in unit:
            served = run.served[row.llm]
            bases = _slo_bases(profiles[row.model], row.model, served)
            over += [(each.finish_s - each.arrival_s) / base for each, base in zip(served, bases, strict=True)]
    in_time = np.mean(np.array(over)[:, None] <= np.array(SLO_SCALES), axis=0)
    return Served(Sums.of(throughputs), tuple(in_time.tolist()))


def _slo_bases(profile: IterationProfile, model: str, served: Sequence[RequestTimes]) -> list[float]:
    """Return the latency of each request alone, of which an SLO is a multiple, as MuxServe's evaluation computes it.

    The model runs on as many devices as it needs. A prompt of fewer than 512 tokens counts as one of 32.
    """
    cost = TableCost(profile, SLO_DEVICES[model])
    contexts = np.array([each.input_tokens + each.output_tokens / 2 for each in served])
    decode = cost.decode_seconds(1, contexts, 1.0)
    prompts = (32 if each.input_tokens < 512 else each.input_tokens for each in served)
    prefill = (cost.prefill_seconds([tokens], 1.0) for tokens in prompts)
    return [p + each.output_tokens * d for p, each, d in zip(prefill, served, decode.tolist(), strict=True)]


def _loads(profiles: dict[str, IterationProfile], unit: list[PublishedModel], strategy: str) -> list[ModelLoad]:
    """Return the models of one unit.

    Under MuxServe they have quotas of the cache in proportion to rate and heads, and shares of the multiprocessors.
    Under other strategies, each model may use the whole cache, up to `SEQUENCES` sequences.
    """
    devices = unit[0].devices
    part = KV_ALONE if strategy == "spatial" else _kv_part([SHAPES[row.model][2] for row in unit], devices)
    store = Store(int(devices * part * DEVICE_BYTES / PART_BYTES))
    heads = [SHAPES[row.model][0] * SHAPES[row.model][1] for row in unit]
    wanted = sum(row.rate * parts for row, parts in zip(unit, heads, strict=True))
    loads = []
    for row, parts in zip(unit, heads, strict=True):
        cost = TableCost(profiles[row.model], devices)
        quota, limits = store.total, OnePhasePolicy(SEQUENCES)
        if strategy == "muxserve":
            quota = max(int(store.total * row.rate * parts / wanted), parts * (1 + 2 * LONGEST // BLOCK_TOKENS))
            prefill_share = PREFILL_SHARES.get(row.model, 1.0)
            limits = OnePhasePolicy(
                row.requests, prefill_share=prefill_share, decode_share=_decode_share(cost, row.rate)
            )
        loads.append(ModelLoad(row.llm, cost, _requests(row), QuotaPool(store, parts, BLOCK_TOKENS, quota), limits))
    return loads


def _kv_part(billions: list[int], devices: int) -> float:
    """Return the KV cache's share of a mesh's memory, for float16 models with these billions of parameters.

    It follows the configuration of MuxServe's placement.
    """
    return (80 - sum(2 * each for each in billions) / devices - OTHER_GB * len(billions)) / 80


def _decode_share(cost: TableCost, rate: float) -> float:
    """Return the smallest of MuxServe's shares with which a model alone sustains its rate; the largest if none does."""
    for share in DECODE_SHARES:
        for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            alone = _throughput(cost, batch, share)
            if alone + min(0.5, 0.1 * alone) >= rate:
                return share
    return DECODE_SHARES[-1]


def _throughput(cost: TableCost, batch: int, share: float) -> float:
    """Return the requests/s of a model alone, with this batch size."""
    prefill = cost.prefill_seconds([INPUT[0]] * batch, 1.0)
    decode = float(cost.decode_seconds(batch, np.array([INPUT[0] + OUTPUT[0] / 2]), share)[0])
    return batch / (prefill + OUTPUT[0] * decode)


def _requests(row: PublishedModel) -> list[RequestLengths]:
    """Draw Poisson arrivals and log-normal lengths, the same for every strategy."""
    draws = np.random.default_rng((int(row.llm.removeprefix("llm-")), row.requests))
    arrivals = np.cumsum(draws.exponential(1 / row.rate, row.requests)).tolist()
    inputs, outputs = (_lengths(draws, row.requests, *law) for law in (INPUT, OUTPUT))
    return [RequestLengths(i, o, a) for i, o, a in zip(inputs, outputs, arrivals, strict=True)]


def _lengths(draws: np.random.Generator, count: int, mean: float, variation: float) -> list[int]:
    sigma2 = np.log(1 + variation**2)
    drawn = draws.lognormal(np.log(mean) - sigma2 / 2, np.sqrt(sigma2), count)
    lengths: list[int] = np.clip(np.rint(drawn), 1, LONGEST).astype(int).tolist()
    return lengths
