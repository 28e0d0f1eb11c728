"""MuxServe's synthetic workloads: 19 LLaMAs on 32 A100s, replayed with its authors' placements.

Every LLM has its own number of Poisson requests at its rate. MuxServe and time sharing use the published meshes,
dedicated devices the published tensor-parallel degrees. Iteration times are MuxServe's own measurements. One figure is
fitted, on the popularity α = 0.7 only: the slowdown of concurrent jobs. Everything else is predicted.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np

from exegpt.report.sections import Section
from exegpt.reproduction.public_data import public_data
from xcore.batching.shared_pool import QuotaPool, Store
from xcore.policies.one_phase import OnePhasePolicy
from xcore.policies.sharing import FirstComeSharing, Sharing, SpatialSharing, TimeSharing
from xcore.quantity import figure_text, signed_percent
from xcore.rows import csv_rows
from xcore.specs.iteration_profile import IterationProfile
from xcore.specs.workload import RequestLengths
from xmulti.sharing.iteration_cost import TableCost
from xmulti.sharing.replay import ModelLoad, replay_unit
from xprofiler.muxserve_tables import muxserve_profiles

STANDS_ON = "Simulated with MuxServe's published cost tables and placements; nothing here was run on a GPU."
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
CONTENTIONS = tuple(1 + part / 20 for part in range(7))
FITTED_ON = "0.7"
QUICK = (
    "three of 20 cases (α = 0.7, 1.3 and 2.1 at scale 0.5), a fifth of their requests; contention fitted on the first"
)
QUICK_CASES, QUICK_PART = (("0.7", "0.5"), ("1.3", "0.5"), ("2.1", "0.5")), 5
"""What `quick` leaves out, the cases that it runs, and the divisor of their numbers of requests."""
TRUNCATED = {("0.9", "0.5"), ("0.9", "0.75"), ("0.9", "1.0")}
"""Cases in which time sharing was measured with a tenth of the requests."""


@dataclass(frozen=True)
class PublishedModel:
    """One LLM of one case, as published."""

    llm: str
    model: str
    rate: float
    mesh: str
    throughput: float
    requests: int

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
class Case:
    """Measured and simulated sums by strategy."""

    alpha: str
    scale: str
    measured: dict[str, Sums]
    simulated: dict[str, Sums]


@dataclass(frozen=True)
class CasesResult:
    """Every case, and the fitted contention."""

    contention: float
    cases: tuple[Case, ...]


def reproduce(progress: Callable[[int, int], None], quick: bool = False) -> CasesResult:
    """Replay every published case, or as in `QUICK`."""
    folder = public_data("MuxServe's", "muxserve")
    profiles, measured = muxserve_profiles(folder / "llama_a100_cost.json"), read_measured(folder)
    if quick:
        measured = {case: _fewer(measured[case]) for case in QUICK_CASES}
    steps = len(measured) + sum(alpha == FITTED_ON for alpha, _ in measured) * len(CONTENTIONS)
    done = 0

    def step() -> None:
        nonlocal done
        progress(done, steps)
        done += 1

    contention = _fitted(profiles, measured, step)
    cases = []
    for (alpha, scale), strategies in measured.items():
        step()
        simulated = {name: simulate(profiles, rows, name, contention) for name, rows in strategies.items()}
        published = {name: Sums.of((row.throughput, row.rate) for row in rows) for name, rows in strategies.items()}
        cases.append(Case(alpha, scale, published, simulated))
    return CasesResult(contention, tuple(cases))


def read_measured(folder: Path) -> dict[tuple[str, str], dict[str, list[PublishedModel]]]:
    """Return the published LLMs of every case, by α and scale, then by strategy."""
    cases: dict[tuple[str, str], dict[str, list[PublishedModel]]] = {}
    for row in csv_rows(folder / "e2e_synthetic_per_llm.csv"):
        figures = (row.number("rate"), row["mesh"], row.number("throughput_req_s"), row.whole("num_requests"))
        of_case = cases.setdefault((row["alpha"], row["scale"]), {})
        of_case.setdefault(row["strategy"], []).append(PublishedModel(row["llm"], row["model"], *figures))
    return dict(sorted(cases.items()))


def _fewer(strategies: dict[str, list[PublishedModel]]) -> dict[str, list[PublishedModel]]:
    """Return a case with a part of each LLM's requests."""
    return {
        name: [replace(row, requests=max(1, row.requests // QUICK_PART)) for row in rows]
        for name, rows in strategies.items()
    }


def _fitted(
    profiles: dict[str, IterationProfile],
    measured: dict[tuple[str, str], dict[str, list[PublishedModel]]],
    step: Callable[[], None],
) -> float:
    """Return the contention with the smallest error of MuxServe's plain sums at α = 0.7."""
    fitted = [strategies["muxserve"] for (alpha, _), strategies in measured.items() if alpha == FITTED_ON]

    def off(contention: float) -> float:
        errors = []
        for rows in fitted:
            step()
            published = Sums.of((row.throughput, row.rate) for row in rows).plain
            errors.append(abs(np.log(simulate(profiles, rows, "muxserve", contention).plain / published)))
        return fmean(errors)

    return min(CONTENTIONS, key=off)


def simulate(
    profiles: dict[str, IterationProfile], rows: list[PublishedModel], strategy: str, contention: float
) -> Sums:
    """Return a case's sums under one strategy."""
    units: dict[str, list[PublishedModel]] = {}
    for row in rows:
        units.setdefault(row.llm if strategy == "spatial" else row.mesh, []).append(row)
    throughputs = []
    for unit in units.values():
        run = replay_unit(_loads(profiles, unit, strategy), STRATEGIES[strategy](), contention)
        throughputs += [(row.requests / run.served[row.llm][-1].finish_s, row.rate) for row in unit]
    return Sums.of(throughputs)


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


def sections(result: CasesResult) -> list[Section]:
    """Return the ratios of every case with a summary, and the sums."""
    return [_ratios(result), _sums(result)]


def _ratios(result: CasesResult) -> Section:
    rows, first, near, signs = [], 0, {"spatial": [0, 0], "temporal": [0, 0]}, [0, 0]
    for case in result.cases:
        cells = [f"{case.alpha} × {case.scale}"]
        best = all(
            getattr(case.simulated["muxserve"], how) >= getattr(case.simulated[other], how)
            for other in near
            for how in ("plain", "weighted")
        )
        first += best
        for other in near:
            ours, theirs = (sums["muxserve"].plain / sums[other].plain for sums in (case.simulated, case.measured))
            cells += [figure_text(theirs), figure_text(ours), signed_percent(ours / theirs - 1)]
            if other == "spatial" or (case.alpha, case.scale) not in TRUNCATED:
                near[other][0] += abs(ours / theirs - 1) <= 0.2
                near[other][1] += 1
        ours, theirs = (sums["temporal"].plain / sums["spatial"].plain for sums in (case.simulated, case.measured))
        if abs(theirs - 1) > 0.1 and (case.alpha, case.scale) not in TRUNCATED:
            signs[0] += (ours > 1) == (theirs > 1)
            signs[1] += 1
        rows.append((*cells, "yes" if best else "no"))
    notes = (
        f"MuxServe has the largest sums of both kinds in {first} of {len(result.cases)} cases (measured: in all).",
        *(f"MuxServe over {name}: within 20 % in {n} of {count}." for name, (n, count) in near.items()),
        f"Whether time sharing beats dedicated devices is predicted correctly in {signs[0]} of {signs[1]} cases.",
        f"Contention {result.contention:g}, fitted on α = {FITTED_ON} alone.",
    )
    columns = ("α × scale", "over spatial", "here", "off", "over temporal", "here", "off", "first")
    return Section("MuxServe: 19 LLaMAs on 32 A100s, sums of requests/s", columns, tuple(rows), notes)


def _sums(result: CasesResult) -> Section:
    """Return the measured and simulated sums."""
    rows: list[tuple[str, ...]] = []
    off: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    for case in result.cases:
        cells = [f"{case.alpha} × {case.scale}"]
        for name in STRATEGIES:
            ours, theirs = case.simulated[name].plain, case.measured[name].plain
            cells += [figure_text(theirs), figure_text(ours)]
            if name != "temporal" or (case.alpha, case.scale) not in TRUNCATED:
                off[name].append(ours / theirs - 1)
        rows.append(tuple(cells))
    columns = ("α × scale", *(head for name in STRATEGIES for head in (name, "here")))
    notes = tuple(
        f"{name}: {signed_percent(min(each))} to {signed_percent(max(each))}." for name, each in off.items() if each
    )
    return Section("sums of requests/s, measured and here", columns, tuple(rows), notes)
