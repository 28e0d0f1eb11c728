"""Every published throughput of TensorRT-LLM, of all models, precisions and devices, beside what data sheets predict.

Left out are version 0.9 (static batches), mixtures of experts in version 1.0, whose mapping the page doesn't state, and
the dense rows that the engine's constants were fitted to. The others are simulated as in `benchmarks/published.py`;
nothing is fitted to other models, precisions or devices.

    python -m benchmarks.published_all [--every N] [--workers N]
"""

import argparse
import csv
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import numpy as np

from benchmarks.published import (
    ENGINE,
    FILE,
    KV_SHARE,
    MOST_SEQUENCES,
    MOST_TOKENS,
    REQUESTS,
    parted,
    published_rows,
    row_of,
)
from xcore.errors import InputError
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.engine_spec import find_engine
from xcore.specs.model import ModelSpec
from xcore.specs.workload import RequestLengths, Workload
from xprofiler.roofline import roofline_profile
from xscheduler.engine_settings import engine_schedule
from xscheduler.settings import Setting

NAMES = {"Mistral-7B": "mistral-7b-v0.3", "DeepSeek-R1-0528": "deepseek-ai/DeepSeek-R1-0528"}
LEAST_ROWS = 8
"""Rows of a group that is judged by itself."""


@dataclass(frozen=True)
class Published:
    """One row: output tokens/s of all devices together."""

    model: str
    device: str
    precision: str
    tp: int
    pp: int
    input: int
    output: int
    requests: int
    tokens_s: float
    attention_dp: int
    """Devices that share the experts and have attention for their own sequences; 1: none do."""

    @property
    def group(self) -> tuple[str, str, str]:
        return self.model, self.device, self.precision

    @property
    def spec(self) -> ModelSpec:
        spec = builtin_model(NAMES.get(self.model, self.model))
        if spec.experts and self.attention_dp > 1:
            return replace(spec, experts=replace(spec.experts, attention_dp=self.attention_dp))
        return spec

    def dtypes(self, spec: ModelSpec) -> tuple[str, str]:
        """The dtypes of weights, and of keys and values."""
        if spec.dtype == "mxfp4":
            return "mxfp4", "bf16"
        return {"fp4": ("nvfp4", "fp8"), "fp8": ("fp8", "fp8"), "fp16": ("fp16", "fp16")}[self.precision]

    def error(self) -> float | None:
        """(predicted - published) / published throughput; None where it can't be answered."""
        from xsimulator.replay.event_simulator import replay

        tp = 1 if self.attention_dp > 1 else self.tp
        try:
            spec, cluster = self.spec, parse_cluster(f"{self.tp * self.pp}x{self.device}", KV_SHARE)
            dtype, kv_dtype = self.dtypes(spec)
            engine = find_engine(ENGINE)
            profile = roofline_profile(spec, cluster, dtype, (tp,), kv_dtype=kv_dtype, engine=engine)
            setting = Setting(spec, cluster, Workload.fixed(self.input, self.output), profile, kv_dtype, ())
            limits = {"max_num_seqs": MOST_SEQUENCES, "max_num_batched_tokens": MOST_TOKENS}
            schedule = engine_schedule(setting, "chunked", tp, None, 16, self.attention_dp, self.pp, **limits)
        except InputError:
            return None
        requests = [RequestLengths(self.input, self.output)] * self.requests
        seconds = replay(schedule, profile, requests, timeline=False).seconds
        return self.requests * self.output / seconds / self.tokens_s - 1.0


def published() -> list[Published]:
    """The rows that count."""
    rows, fitted = [], set(parted(published_rows())[0])
    with FILE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["version"] == "0.9" or row_of(row) in fitted:
                continue
            each = int(row["gpus"]) if row["per"] == "gpu" else 1
            published_row = Published(
                row["model"],
                row["gpu"],
                row["precision"],
                int(row["tp"]),
                int(row["pp"]),
                int(row["isl"]),
                int(row["osl"]),
                int(row["requests"] or REQUESTS),
                float(row["tokens_per_s"]) * each,
                int(row["ep"]) if row["attention_dp"] == "true" else 1,
            )
            if row["version"] != "1.0" or not published_row.spec.experts:
                rows.append(published_row)
    return rows


def errors(rows: Sequence[Published], workers: int) -> list[float | None]:
    """The error of each."""
    if workers == 1:
        return [row.error() for row in rows]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        return list(pool.map(Published.error, rows, chunksize=4))


def print_errors(rows: Sequence[Published], found: Sequence[float | None]) -> None:
    """Print the errors by group and of all, and which groups have unanswered rows."""
    groups: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row, error in zip(rows, found, strict=True):
        if error is not None:
            groups["all",].append(error)
            groups[row.group].append(error)
    for name, among in sorted(groups.items(), key=lambda item: (item[0] != ("all",), item[0])):
        if name == ("all",) or len(among) >= LEAST_ROWS:
            text = f"{len(among):5} rows, median error {np.median(np.abs(among)):6.1%}, bias {np.median(among):+7.1%}"
            print(f"{' '.join(name):46}{text}")
    none = Counter(row.group for row, error in zip(rows, found, strict=True) if error is None)
    texts = [f"{' '.join(group)} {number}" for group, number in none.items()]
    print(f"unanswered: {', '.join(texts) or 'none'}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="only every so many rows")
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    if not FILE.exists():
        raise SystemExit(f"'{FILE}' is not there: set EXEGPT_DATA to a folder with published measurements.")
    rows = published()[:: arguments.every]
    print_errors(rows, errors(rows, arguments.workers))


if __name__ == "__main__":
    main()
