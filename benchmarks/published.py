"""Throughputs that TensorRT-LLM published, beside what exegpt predicts for them from data sheets alone.

406 rows of dense models in 16 and 8 bits, versions 0.14 and later, on H100, H200, A100 and L40S. Each is simulated as
its page describes it: one replica at the published degree, all requests queued at once, in-flight batching, 95 % of the
memory that is left for keys and values, no latency bound; the event simulator runs the list with its ramp and drain.
Nothing is measured here and no GPU is needed.

    python -m benchmarks.published [--tables] [--fit] [--fit-links] [--facts] [--every N] [--workers N]
"""

import argparse
import csv
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, replace
from multiprocessing import get_context

import numpy as np

from benchmarks.silicon import DATA, chunked_engine
from xcore.arrays import Array
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.engine_spec import NO_ENGINE, EngineSpec, find_engine
from xcore.specs.profile import Profile
from xcore.specs.workload import RequestLengths, Workload
from xprofiler.roofline import roofline_profile
from xprofiler.roofline_errors import RooflineErrors

FILE = DATA / "published" / "trtllm_perf.csv"
ENGINE = "tensorrt-llm"
LOAD = "all requests queued at once"
MODELS = {
    "Llama-3.1-8B": "llama-3.1-8b",
    "Llama-3.1-70B": "llama-3.1-70b",
    "Llama-3.3-70B": "llama-3.1-70b",  # the same sizes
    "Llama-3.1-405B": "llama-3.1-405b",
    "Mistral-7B": "mistral-7b-v0.3",  # the pages' has no window
}
DEVICES = {"H100-SXM": "H100-SXM", "H200-SXM": "H200-SXM", "A100-80GB-SXM": "A100-80GB", "L40S": "L40S"}
SYSTEMS = {"H100-SXM": "h100_sxm", "H200-SXM": "h200_sxm", "A100-80GB": "a100_sxm", "L40S": "l40s"}
KV_SHARE = 0.95
"""Of what weights, activations and the engine leave, as most pages' commands say."""
MOST_SEQUENCES, MOST_TOKENS = 2048, 8192
"""The engine's own defaults, of all versions; twice or half of either changes the median by less than 2 %."""
REQUESTS = 3000
"""Where a row doesn't say."""


@dataclass(frozen=True)
class Row:
    """One published figure: output tokens/s of all devices together."""

    model: str
    device: str
    dtype: str
    tp: int
    input: int
    output: int
    requests: int
    version: str
    tokens_s: float

    @property
    def order(self) -> str:
        """A fixed disorder: rows are fitted or held out by their place in it."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def row_of(row: dict[str, str]) -> Row | None:
    """A row of the file if it is one of a dense model, of version 0.14 or later, on a device of `DEVICES`."""
    if row["model"] not in MODELS or row["gpu"] not in DEVICES or row["precision"] not in ("fp16", "fp8"):
        return None
    if row["version"] == "0.9" or row["pp"] != "1":
        return None
    return Row(
        model=MODELS[row["model"]],
        device=DEVICES[row["gpu"]],
        dtype=row["precision"],
        tp=int(row["tp"]),
        input=int(row["isl"]),
        output=int(row["osl"]),
        requests=int(row["requests"] or REQUESTS),
        version=row["version"],
        tokens_s=float(row["tokens_per_s"]) * (int(row["gpus"]) if row["per"] == "gpu" else 1),
    )


def published_rows() -> list[Row]:
    """The dense rows of versions 0.14 and later whose devices are in `DEVICES`."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return [found for row in csv.DictReader(file) if (found := row_of(row))]


def parted(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The rows that constants are fitted to, every fifth in the order of a hash, and the others, which count."""
    ordered = sorted(rows, key=lambda row: row.order)
    return ordered[4::5], [row for place, row in enumerate(ordered, 1) if place % 5]


Source = Callable[[Row, EngineSpec], Profile]


def roofline(row: Row, engine: EngineSpec) -> Profile:
    """The default profile of a named cluster."""
    return roofline_profile(
        builtin_model(row.model),
        parse_cluster(f"{row.tp}x{row.device}"),
        row.dtype,
        (row.tp,),
        kv_dtype=row.dtype,  # as the pages' commands say
        engine=engine,
    )


def operator_tables(row: Row, engine: EngineSpec) -> Profile:
    """Of aiconfigurator's package, TensorRT-LLM's kernels."""
    return _tables(row.model, SYSTEMS[row.device], row.dtype, engine)


@functools.lru_cache(maxsize=4)
def _tables(model: str, system: str, dtype: str, engine: EngineSpec) -> Profile:
    from xprofiler.aiconfigurator import aiconfigurator_profile

    return aiconfigurator_profile(builtin_model(model), system, "trtllm", dtype, kv_dtype=dtype, serving=engine)


def seconds(row: Row, profile: Profile) -> float:
    """How long the product's replay takes for the row's requests."""
    from xsimulator.replay.event_simulator import replay

    workload, cluster = Workload.fixed(row.input, row.output), f"{row.tp}x{row.device}"
    schedule = chunked_engine(
        *(builtin_model(row.model), cluster, workload, profile, row.dtype, row.tp, MOST_SEQUENCES, MOST_TOKENS),
        KV_SHARE,
    )
    requests = [RequestLengths(row.input, row.output)] * row.requests
    return replay(schedule, profile, requests, timeline=False).seconds


def error(row: Row, source: Source, engine: EngineSpec) -> float:
    """(predicted - published) / published throughput."""
    return row.requests * row.output / seconds(row, source(row, engine)) / row.tokens_s - 1.0


def errors(rows: Sequence[Row], engine: EngineSpec, source: Source = roofline, workers: int = 1) -> Array:
    """[rows]: of each."""
    work = functools.partial(error, source=source, engine=engine)
    if workers == 1:
        return np.array([work(row) for row in rows])
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        return np.array(list(pool.map(work, rows, chunksize=4)))


# The fit

_ITERATION_S = 1.03e-3
"""An engine's time per iteration, as calibrated on a vLLM server's run (benchmarks/silicon.py, table a): beside the
time per sequence these rows don't determine it."""
_SCALES = (50e-6, 0.1, 5e-6)
"""Of the three fitted constants: wait in seconds, slowness, seconds per sequence; the clock is 1 / (1 + slowness)."""


def _engine(at: Array) -> EngineSpec:
    wait, slowness, sequence = (float(x * scale) for x, scale in zip(at, _SCALES, strict=True))
    return EngineSpec(ENGINE, wait, 1.0 / (1.0 + slowness), _ITERATION_S, sequence)


def fit(rows: Sequence[Row], workers: int) -> EngineSpec:
    """The three constants that bring predictions nearest to these rows (Cauchy loss of the logarithms).

    With all requests queued at once, no decision depends on time: seconds are linear in all constants but the clock,
    and nearly in its inverse. So they are simulated at one point and a step along each axis, twice.
    """
    from scipy.optimize import least_squares

    at, step = np.ones(3), 0.5
    for _ in range(2):
        engines = [_engine(at), *(_engine(at + step * axis) for axis in np.eye(3))]
        ratio = np.array([1.0 / (1.0 + errors(rows, engine, workers=workers)) for engine in engines])
        slope = (ratio[1:] - ratio[0]) / step

        def residuals(x: Array, at: Array = at, first: Array = ratio[0], slope: Array = slope) -> Array:
            return np.log(np.maximum(first + (x - at) @ slope, 1e-3))

        at = least_squares(residuals, at, bounds=(0.0, np.inf), loss="cauchy", f_scale=0.05).x
    return _engine(at)


def fit_link(rows: Sequence[Row], workers: int) -> float:
    """Return the ring's bandwidth in GB/s that brings predictions nearest to L40S rows of one degree."""

    def loss(rate: int) -> float:
        source = functools.partial(_roofline_of_ring, ring=((2, rate * 1e9),))
        return float(abs(np.log1p(errors(rows, find_engine(ENGINE), source, workers))).mean())

    return min(range(10, 31), key=loss)


def _roofline_of_ring(row: Row, engine: EngineSpec, ring: tuple[tuple[int, float], ...]) -> Profile:
    cluster = parse_cluster(f"{row.tp}x{row.device}")
    other = replace(cluster, intra=replace(cluster.intra, ring_bytes_s=ring))
    return roofline_profile(builtin_model(row.model), other, row.dtype, (row.tp,), kv_dtype=row.dtype, engine=engine)


# What is printed


def compared(rows: Sequence[Row], row_errors: Array, imported: Array) -> tuple[RooflineErrors, ...]:
    """The facts that answers print, of every device and degree, errors rounded to tenths of a percent; `imported` are
    those by operator tables.
    """
    facts = []
    for device, tp in sorted({(row.device, row.tp) for row in rows}):
        among = [(row.device, row.tp) == (device, tp) for row in rows]
        absolute, by_tables = abs(row_errors[among]), abs(imported[among])
        figures = (np.median(absolute), np.mean(absolute > 0.25), np.median(by_tables))
        shares = (round(float(share), 3) for share in figures)
        facts.append(RooflineErrors("throughput", ENGINE, LOAD, device, tp, len(absolute), *shares))
    return tuple(facts)


def print_errors(title: str, rows: Sequence[Row], row_errors: Array) -> None:
    """Signed and absolute medians over all rows, by degree and by device."""
    print(f"{title}\n    {'':14} {'rows':>5} {'median':>8} {'absolute':>9} {'beyond 25%':>11}")
    groups: list[tuple[str, list[bool]]] = [("all", [True] * len(rows))]
    groups += [(f"TP {tp}", [row.tp == tp for row in rows]) for tp in sorted({row.tp for row in rows})]
    groups += [(name, [row.device == name for row in rows]) for name in sorted({row.device for row in rows})]
    for name, among in groups:
        group_errors = row_errors[np.array(among)]
        median, absolute, beyond = (
            np.median(group_errors),
            np.median(abs(group_errors)),
            np.mean(abs(group_errors) > 0.25),
        )
        print(f"    {name:14} {len(group_errors):5} {median:+8.1%} {absolute:9.1%} {beyond:11.0%}")


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="predict from aiconfigurator's operator tables too")
    parser.add_argument("--fit", action="store_true", help="fit the engine's constants again, and take those")
    parser.add_argument("--fit-links", action="store_true", help="fit the bandwidth of L40S's rings, and print it")
    parser.add_argument("--facts", action="store_true", help="print the rows of xprofiler/roofline_errors.py")
    parser.add_argument("--every", type=int, default=1, help="only every so many rows")
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    if not FILE.exists():
        raise SystemExit(f"'{FILE}' is not there: set EXEGPT_DATA to a folder with published measurements.")
    fitted, held_out = parted(published_rows())
    engine = find_engine(ENGINE)
    if arguments.fit:
        engine = fit(fitted, arguments.workers)
        print(f"fitted to {len(fitted)} rows: {engine}")
    if arguments.fit_links:
        for tp in (4, 8):
            among = [row for row in fitted if (row.device, row.tp) == ("L40S", tp)]
            print(f"rings of {tp} L40S: {fit_link(among, arguments.workers)} GB/s, fitted to {len(among)} rows")
    rows = held_out[:: arguments.every]
    work = functools.partial(errors, workers=arguments.workers)
    row_errors = work(rows, engine)
    print_errors(f"roofline, engine {engine.name}: the rows that nothing was fitted to", rows, row_errors)
    print_errors("roofline, no engine: nothing fitted", rows, work(rows, NO_ENGINE))
    if arguments.tables or arguments.facts:
        imported = work(rows, engine, operator_tables)
        print_errors("operator tables", rows, imported)
        for fact in compared(rows, row_errors, imported) if arguments.facts else ():
            print(f"    Compared({', '.join(json.dumps(value) for value in astuple(fact))}),")


if __name__ == "__main__":
    main()
