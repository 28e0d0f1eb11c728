"""What vLLM adds to its kernels: waits per all-reduce fitted on a fifth of measured rows, compared with the others.

Measured: Llama-3.1-70B in fp8 under 4 to 64 clients on H100, H200 and B200 (`silicon_sample.csv` of the package
aiconfigurator-core 0.12.0, clients that decode greedily), predicted from data sheets. And single engine steps of
Qwen3-32B on a B300, which have no all-reduce. Nothing is measured here and no GPU is needed.

    python -m benchmarks.vllm_terms [--fit] [--facts] [--tables] [--kv-dtype DTYPE] [--workers N]
"""

import argparse
import csv
import functools
import gzip
import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, replace
from multiprocessing import get_context

import numpy as np

from benchmarks.silicon import DATA, Aggregated, aggregated_rows, predict_aggregated
from xcore.arrays import Array
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import ClusterSpec, parse_cluster
from xcore.specs.device_spec import LinkSpec
from xcore.specs.engine_spec import NVLINK4_BYTES_S, NVLINK5_BYTES_S, EngineSpec, LinkWait, find_engine
from xcore.specs.profile import Profile
from xprofiler.aiconfigurator import SYSTEMS, aiconfigurator_profile
from xprofiler.roofline import roofline_profile
from xprofiler.roofline_errors import RooflineErrors

ENGINE = "vllm"
MODEL = replace(builtin_model("llama-3.1-70b"), sorts_logits=False)
STEPS_FILE = DATA / "measured" / "aic_fpm" / "b300_vllm0.20.1_steps.csv.gz"
DEVICES_FILE = DATA / "devices.csv"
COUNTED = ("h100_sxm", "h200_sxm")
"""The systems whose errors have limits: B200's are reported."""
LOAD = "4 to 64 clients in a closed loop"


# The rows


def vllm_rows() -> list[Aggregated]:
    """Return vLLM's fp8 rows of Llama-3.1-70B."""
    return [row for row in aggregated_rows() if row.engine == ENGINE]


def parted(rows: Sequence[Aggregated]) -> tuple[list[Aggregated], list[Aggregated]]:
    """Return the rows that constants are fitted to, every fifth in the order of a hash, and the others, which count."""
    ordered = sorted(rows, key=lambda row: hashlib.sha256(row.name.encode()).hexdigest())
    return ordered[4::5], [row for place, row in enumerate(ordered, 1) if place % 5]


def kv_dtype(row: Aggregated) -> str:
    """Return the dtype of a row's keys and values, which the table does not name: 16 bits, vLLM's default, except where
    64 clients share one device. There 16 bits hold so few sequences that the others would wait for a third of their
    latency at least; the measured times to first token are a tenth of that.
    """
    return "fp8" if (row.tp, row.clients) == (1, 64) else "bf16"


@dataclass(frozen=True)
class Comparison:
    """Where a row's prediction comes from."""

    engine: EngineSpec
    tables: bool = False
    """Whether aiconfigurator's operator tables replace the roofline."""
    kv: str | None = None
    """None: as `kv_dtype`."""

    def predicted(self, row: Aggregated) -> tuple[float, float]:
        """Return (TTFT, TPOT) in milliseconds."""
        kv = self.kv or kv_dtype(row)
        return predict_aggregated(row, _profile(row.system, row.tp, kv, self.engine, self.tables), kv)


@functools.lru_cache(maxsize=8)
def _profile(system: str, tp: int, kv: str, engine: EngineSpec, tables: bool) -> Profile:
    if tables:
        return aiconfigurator_profile(MODEL, system, "vllm", "fp8", kv, serving=engine)
    return roofline_profile(MODEL, parse_cluster(f"{tp}x{SYSTEMS[system]}"), "fp8", (tp,), kv_dtype=kv, engine=engine)


def predictions(rows: Sequence[Aggregated], comparison: Comparison, workers: int = 1) -> Array:
    """Return [rows, 2]: TTFT and TPOT in milliseconds."""
    if workers == 1:
        return np.array([comparison.predicted(row) for row in rows])
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        return np.array(list(pool.map(comparison.predicted, rows, chunksize=4)))


def relative_errors(rows: Sequence[Aggregated], predicted: Array) -> Array:
    """Return [rows, 2]: (predicted - measured) / measured TTFT and TPOT."""
    return np.asarray(predicted / np.array([(row.ttft_ms, row.tpot_ms) for row in rows]) - 1.0)


Group = tuple[str, int, int]
"""System, tensor-parallel degree, clients."""


def groups(rows: Sequence[Aggregated], errors: Array) -> dict[Group, float]:
    """Return the mean absolute error of each group's rows."""
    names = [(row.system, row.tp, row.clients) for row in rows]
    return {name: float(abs(errors[[n == name for n in names]]).mean()) for name in sorted(set(names))}


# Engine steps without an all-reduce


@dataclass(frozen=True)
class Step:
    """One decoding step of a shard of Qwen3-32B; milliseconds."""

    tp: int
    batch: int
    context: int
    ms: float


def decoding_steps() -> list[Step]:
    """Return the decoding steps that were measured on a B300, in 16 bits."""
    with gzip.open(STEPS_FILE, "rt", encoding="utf-8", newline="") as file:
        return [
            Step(
                int(row["attn_tp"]),
                int(row["batch_size"]),
                int(row["new_tokens"]) + int(row["past_kv"]),
                float(row["latency_ms"]),
            )
            for row in csv.DictReader(file)
            if row["model"] == "Qwen/Qwen3-32B" and row["phase"] == "gen"
        ]


def _b300() -> ClusterSpec:
    """Return eight B300 with the shares of peak rates that a B200 reaches, and links that take no time."""
    with DEVICES_FILE.open(encoding="utf-8", newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["kind"] == "B300-SXM")
    like = parse_cluster("8xB200")
    flops = {dtype: float(row[f"{dtype}_flops_s"]) for dtype in ("fp32", "fp16", "bf16", "fp8")}
    device = replace(
        like.device,
        kind="B300",
        flops_s=flops,
        memory_bytes=float(row["memory_bytes"]),
        bandwidth_bytes_s=float(row["bandwidth_bytes_s"]),
    )
    return replace(like, device=device, intra=LinkSpec(1e18, 0.0))


def step_ms(steps: Sequence[Step], engine: EngineSpec) -> Array:
    """Return [steps]: predicted milliseconds; a shard on one device waits for no other."""
    from xcore.specs.schedule import Stage
    from xsimulator.cost.group import Group as DeviceGroup
    from xsimulator.cost.stage import stage_costs

    model = builtin_model("qwen3-32b")
    alone = replace(engine, wait_s=0.0, waits=())
    profile = roofline_profile(replace(model, sorts_logits=False), _b300(), "bf16", engine=alone)

    def seconds(step: Step) -> float:
        stage = Stage(tuple(range(step.tp)), step.tp, "both", None, (0, model.layers))
        (cost,) = stage_costs((stage,), lambda tp: DeviceGroup(profile.degree(tp), profile.overhead))
        return cost.step(None, step.batch, step.context)

    return 1e3 * np.array([seconds(step) for step in steps])


# The fit

_LINKS = {"h100_sxm": 0, "h200_sxm": 0, "b200_sxm": 1}
"""Places of NVLink 4 and 5."""
_DEGREES = (2, 4, 8)
_UNIT_S = 10e-6


def _with_waits(engine: EngineSpec, waits: Array) -> EngineSpec:
    """Return the engine with `waits` [links, degrees] in seconds for the links that are fitted."""
    fitted = [
        LinkWait(least, tuple(zip(_DEGREES, row.tolist(), strict=True)))
        for least, row in zip((NVLINK4_BYTES_S, NVLINK5_BYTES_S), waits, strict=True)
    ]
    floors = {wait.least_bytes_s for wait in fitted}
    return replace(engine, waits=(*fitted, *(wait for wait in engine.waits if wait.least_bytes_s not in floors)))


def fit(rows: Sequence[Aggregated], engine: EngineSpec, kv: str | None, workers: int) -> EngineSpec:
    """Return the engine with the waits that bring TPOT nearest to these rows (soft L1 loss of the logarithms).

    No decision of these replays depends on time, so TPOT is linear in the waits.
    """
    from scipy.optimize import least_squares

    shape = (len(set(_LINKS.values())), len(_DEGREES))
    shared = [row for row in rows if row.tp > 1]
    bare, unit = (
        predictions(shared, Comparison(_with_waits(engine, np.full(shape, seconds)), kv=kv), workers)[:, 1]
        for seconds in (0.0, _UNIT_S)
    )
    place = np.array([_LINKS[row.system] * shape[1] + _DEGREES.index(row.tp) for row in shared])
    measured = np.array([row.tpot_ms for row in shared])

    def residuals(waits: Array) -> Array:
        logarithms: Array = np.log((bare + waits[place] * (unit - bare)) / measured)
        return logarithms

    best = least_squares(residuals, np.full(shape, 0.5).ravel(), bounds=(0, np.inf), loss="soft_l1", f_scale=0.05).x
    return _with_waits(engine, _UNIT_S * best.reshape(shape))


# What is printed


def compared(rows: Sequence[Aggregated], errors: Array, imported: Array) -> tuple[RooflineErrors, ...]:
    """Return the facts that answers print, by device and degree, errors rounded to tenths of a percent; `imported` are
    those by operator tables.
    """
    facts = []
    for system, tp in sorted({(row.system, row.tp) for row in rows}):
        among = [(row.system, row.tp) == (system, tp) for row in rows]
        absolute, by_tables = abs(errors[among]), abs(imported[among])
        figures = (np.median(absolute), np.mean(absolute > 0.25), np.median(by_tables))
        shares = (round(float(share), 3) for share in figures)
        facts.append(RooflineErrors("time per token", ENGINE, LOAD, SYSTEMS[system], tp, len(absolute), *shares))
    return tuple(facts)


def print_errors(title: str, rows: Sequence[Aggregated], errors: Array) -> None:
    """Print mean absolute (and signed) errors by system and degree, and the groups beyond 15 %."""
    print(f"{title}\n    {'':14} {'rows':>5} {'TPOT':>7} {'signed':>8} {'TTFT':>7} {'signed':>8}")
    parts = [("H100 and H200", [row.system in COUNTED for row in rows])]
    for system, tp in sorted({(row.system, row.tp) for row in rows}):
        parts.append((f"{system} TP {tp}", [(row.system, row.tp) == (system, tp) for row in rows]))
    for name, among in parts:
        part = errors[among]
        (ttft, tpot), (ttft_sign, tpot_sign) = abs(part).mean(axis=0), part.mean(axis=0)
        print(f"    {name:14} {len(part):5} {tpot:7.1%} {tpot_sign:+8.1%} {ttft:7.1%} {ttft_sign:+8.1%}")
    by_group = groups(rows, errors[:, 1])
    beyond = {group: error for group, error in by_group.items() if error > 0.15}
    texts = [f"{system} TP {tp} x{clients} {error:.0%}" for (system, tp, clients), error in beyond.items()]
    print(f"    {len(by_group)} groups, TPOT beyond 15 %: {', '.join(texts) or 'none'}")


def print_steps(engine: EngineSpec) -> None:
    """Print how far decoding steps of Qwen3-32B on a B300 are off, by the degree of the shard."""
    steps = decoding_steps()
    errors = step_ms(steps, engine) / np.array([step.ms for step in steps]) - 1.0
    print("decoding steps of Qwen3-32B on a B300, one shard: median error, absolute")
    for tp in sorted({step.tp for step in steps}):
        part = errors[[step.tp == tp for step in steps]]
        print(f"    TP {tp} {len(part):5} {np.median(part):+7.1%} {np.median(abs(part)):7.1%}")


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the waits again, and take those")
    parser.add_argument("--facts", action="store_true", help="print the rows of xprofiler/roofline_errors.py")
    parser.add_argument("--tables", action="store_true", help="predict from aiconfigurator's operator tables too")
    parser.add_argument("--kv-dtype", help="bf16 or fp8 for all rows")
    parser.add_argument("--engine", default=ENGINE)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    fitted, rows = parted(vllm_rows())
    engine, kv = find_engine(arguments.engine), arguments.kv_dtype
    if arguments.fit:
        engine = fit(fitted, engine, kv, arguments.workers)
        print(f"fitted to {len(fitted)} rows: {engine.waits}")
    errors = relative_errors(rows, predictions(rows, Comparison(engine, kv=kv), arguments.workers))
    print_errors(f"data sheets, engine {engine.name}: the {len(rows)} rows that nothing was fitted to", rows, errors)
    if STEPS_FILE.exists() and DEVICES_FILE.exists():
        print_steps(engine)
    if arguments.tables or arguments.facts:
        imported = relative_errors(rows, predictions(rows, Comparison(engine, True, kv), arguments.workers))
        print_errors("aiconfigurator's operator tables, the same rows", rows, imported)
        for fact in compared(rows, errors[:, 1], imported[:, 1]) if arguments.facts else ():
            print(f"    Compared({', '.join(json.dumps(value) for value in astuple(fact))}),")


if __name__ == "__main__":
    main()
