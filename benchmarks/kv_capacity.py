"""KV capacities that vLLM logged as it started, beside what the memory model of its version predicts.

Rows of 0.17 and later hold the promise: within 0.6 GiB per GPU, and within 5 % of the tokens where at least 10 GiB are
left. Earlier ones are reported. What didn't start must be refused. The components of the model have other sources
(xcore/specs/engine_memory.py); nothing is fitted to these rows. With pipeline stages the log's GiB is the first
worker's, and stands beside the first stage; the tokens are those of the stage that holds the fewest.

    python -m benchmarks.kv_capacity
"""

import csv
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.silicon import DATA
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import ClusterSpec, parse_cluster
from xcore.specs.device_spec import DeviceSpec, LinkSpec
from xcore.specs.engine_memory import vllm_memory
from xcore.specs.schedule import BLOCK_SIZE
from xprofiler.roofline import roofline_profile
from xscheduler.allocation import uniform_stages
from xscheduler.engine_settings import engine_defaults
from xsimulator.cost.cost_model import CostModel

FILE = DATA.parent / "cases" / "kv_capacity.csv"
KINDS = {"H100-80GB": "H100-SXM", "RTX4090": "RTX4090"}
_RTX3090 = DeviceSpec("RTX3090", 24 * 2.0**30, 9.36e11, {"bf16": 7.1e13}, visible_bytes=23.58 * 2**30)
"""Not built in; its visible memory is in pull request 14447 of vLLM."""
GIB_OFF, SHARE_OFF, GIB_LEFT = 0.6, 0.05, 10.0
_GIB = 2.0**30
_V0 = ("2024", "2025")
"""Rows that are dated instead of having a version: of the engine before V1, whose --max-num-seqs is 256."""


@dataclass(frozen=True)
class Row:
    """One server's start."""

    source: str
    gpu: str
    gpus: int
    model: str
    weights: str
    kv_dtype: str
    layout: str
    memory_fraction: float
    vllm: str
    max_num_batched_tokens: int
    kv_tokens: int
    """0: it doesn't start."""

    @property
    def promised(self) -> bool:
        """Whether it is of 0.17 or later."""
        return not self.vllm.startswith(_V0) and [int(part) for part in self.vllm.split(".")] >= [0, 17]

    @property
    def name(self) -> str:
        """What was started."""
        return f"{self.model} {self.weights}, {self.kv_dtype} keys; {self.layout} {self.gpu}, {self.vllm}"


@dataclass(frozen=True)
class Capacity:
    """The predicted room for keys and values."""

    gib: float
    """On one device of the first stage; negative: so much is missing."""
    logged_gib: float
    tokens: int
    """0: it doesn't start."""


def rows(file: Path = FILE) -> list[Row]:
    """The file's."""
    with file.open(encoding="utf-8", newline="") as lines:
        return [
            Row(
                source=line["source"],
                gpu=line["gpu"],
                gpus=int(line["gpus"]),
                model=line["model"],
                weights=line["weights"],
                kv_dtype=line["kv_dtype"],
                layout=line["layout"],
                memory_fraction=float(line["memory_fraction"]),
                vllm=line["vllm"],
                max_num_batched_tokens=int(line["max_num_batched_tokens"]),
                kv_tokens=int(line["kv_tokens"]),
            )
            for line in csv.DictReader(lines)
        ]


def _cluster(row: Row) -> ClusterSpec:
    if row.gpu == "RTX3090":
        link = LinkSpec(19e9, 15e-6)
        return ClusterSpec("RTX3090", 1, row.gpus, _RTX3090, link, link, row.memory_fraction)
    return parse_cluster(f"{row.gpus}x{KINDS[row.gpu]}", row.memory_fraction)


def capacity(row: Row) -> Capacity:
    """The prediction for a row's settings."""
    model, cluster = builtin_model(row.model), _cluster(row)
    tp = int(row.layout[2:]) if row.layout.startswith("TP") else 1
    stages = uniform_stages(model, cluster, tp)
    rates = replace(cluster.device, flops_s={"fp8": 1.0} | cluster.device.flops_s)
    profile = roofline_profile(model, replace(cluster, device=rates), row.weights, (tp,), kv_dtype=row.kv_dtype)
    cost_model = CostModel(model, cluster, profile, row.kv_dtype, memory=vllm_memory(row.vllm))
    residents = 256 if row.vllm.startswith(_V0) else engine_defaults("vllm", cluster).max_num_seqs
    memory = cost_model.replica(stages).memory((row.max_num_batched_tokens, residents))
    tokens = BLOCK_SIZE * max(0, min(stage.blocks for stage in memory))
    logged = row.kv_tokens * memory[0].block / BLOCK_SIZE
    return Capacity(memory[0].free / _GIB, logged / _GIB, tokens)


def holds(row: Row, predicted: Capacity) -> bool:
    """Whether the prediction is as near to the log as is promised."""
    if not row.kv_tokens:
        return not predicted.tokens
    near = abs(predicted.gib - predicted.logged_gib) <= GIB_OFF
    return near and (predicted.logged_gib < GIB_LEFT or abs(predicted.tokens / row.kv_tokens - 1) <= SHARE_OFF)


def main() -> None:
    """Print every row; SystemExit 1 where a promise is broken."""
    if not FILE.exists():
        raise SystemExit(f"'{FILE}' is not there: set EXEGPT_DATA to the data folder beside `cases`.")
    broken = 0
    print(f"{'':64} {'logged':>18} {'predicted':>18} {'error':>18}")
    for row in rows():
        predicted = capacity(row)
        kept = holds(row, predicted)
        counts = row.promised or not row.kv_tokens
        broken += counts and not kept
        off = predicted.gib - predicted.logged_gib
        error = f"{off:+5.2f} GiB {predicted.tokens / row.kv_tokens - 1:+7.1%}" if row.kv_tokens else "         refused"
        mark = ("" if kept else "  BROKEN") if counts else "  reported"
        print(
            f"{row.name:64} {predicted.logged_gib:6.2f} {row.kv_tokens:11,} {predicted.gib:6.2f} "
            f"{predicted.tokens:11,} {error if row.kv_tokens or kept else 'it starts'}{mark}"
        )
    raise SystemExit(1 if broken else 0)


if __name__ == "__main__":
    main()
