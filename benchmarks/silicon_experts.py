"""Mixtures of experts under a fixed number of clients: predictions beside what others measured.

Rows are the aggregated ones of aiconfigurator's `silicon_sample.csv`, with a replay of ten requests for each client.
Four predictions: imported kernels with the time of the product's engine presets, which nothing here is fitted to; the
same kernels with an engine's time by every tenth row of a group (`benchmarks/engine_calibration.py`); the data sheet;
and with `--peer` aiconfigurator's own. Rows that calibrate, and rows with the same configuration, are in no error.

Left out and counted: degrees that a system of eight GPUs lacks or that disagree with those of the experts; splits that
the product doesn't plan; times to first token of ten seconds and more, where the server held fewer sequences than there
were clients; second copies of a measurement.

    python -m benchmarks.silicon_experts [--peer PYTHON] [--lines FILE]

PYTHON is the interpreter of an environment with aiconfigurator 0.12.0, or a file with its estimates from
`benchmarks/silicon_peer.py --experts`.
"""

import argparse
import csv
import functools
import json
import subprocess
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.engine_calibration import EngineTime, Times, calibrated, tenth
from benchmarks.silicon import Aggregated, predict_clients
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.engine_spec import NO_ENGINE, find_engine
from xcore.specs.model import ModelSpec
from xcore.specs.profile import Profile
from xprofiler.aiconfigurator import SYSTEMS, aiconfigurator_profile, systems_folder
from xprofiler.roofline import roofline_profile

MODELS = {
    "MiniMaxAI/MiniMax-M2.5": "minimax-m2.5",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
}
ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt-llm"}
MOST = 8
"""Devices of a system."""
SOURCES = ("tables", "tables, calibrated", "data sheet", "aiconfigurator")
LATEST_MS = 1e4
"""Longest mean time to first token of the rows that are compared."""
_NAMES = ("id", "silicon_data_source", "backend_version")


@dataclass(frozen=True)
class Group:
    """Rows of one model, system, engine and precision."""

    model: str
    system: str
    engine: str
    dtype: str

    @property
    def kv_dtype(self) -> str:
        """Keys and values: 8 bits where the weights have them and the system is newer than an H100, as in the runs."""
        return "fp8" if self.system != "h100_sxm" and "gpt-oss" not in self.model else "bf16"

    def spec(self, expert_parallel: bool) -> ModelSpec:
        """The model with parts of each expert, or with whole experts, on each device."""
        spec = builtin_model(self.model)
        assert spec.experts is not None
        return replace(spec, experts=replace(spec.experts, expert_parallel=expert_parallel))


@dataclass(frozen=True)
class Row:
    """One measurement: its clients, and whether each device has whole experts."""

    served: Aggregated
    expert_parallel: bool


@functools.cache
def profile(group: Group, source: str, tp: int, expert_parallel: bool) -> Profile:
    """The profile of a source, with the engine's waits and own time."""
    spec, engine = group.spec(expert_parallel), find_engine(ENGINES[group.engine])
    if source.startswith("tables"):
        serving = engine if source == "tables" else NO_ENGINE
        return aiconfigurator_profile(spec, group.system, group.engine, group.dtype, group.kv_dtype, serving=serving)
    cluster = parse_cluster(f"{tp}x{SYSTEMS[group.system]}")
    return roofline_profile(spec, cluster, group.dtype, (tp,), kv_dtype=group.kv_dtype, engine=engine)


def read() -> tuple[dict[Group, list[Row]], Counter[str]]:
    """The rows of each group, and how many are left out for which reason."""
    folder = systems_folder()
    if folder is None:
        raise SystemExit("aiconfigurator is not installed: pip install exegpt[gpu-data]")
    groups: dict[Group, list[Row]] = defaultdict(list)
    left_out: Counter[str] = Counter()
    copies = set()
    with (folder / "silicon_sample.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            name = MODELS.get(row["model_path"])
            if name is None or row["mode"] != "agg":
                continue
            reason = _left_out(row)
            copy = tuple(value for column, value in row.items() if column not in _NAMES)
            if not reason and copy in copies:
                reason = "second copies of a measurement"
            copies.add(copy)
            if reason:
                left_out[reason] += 1
                continue
            dtype = "mxfp4" if "gpt-oss" in name else "fp8" if row["precision"] == "fp8" else "nvfp4"
            groups[Group(name, row["system"], row["backend"], dtype)].append(_row(row))
    return dict(sorted(groups.items(), key=str)), left_out


def _left_out(row: Mapping[str, str]) -> str:
    """Why a row is left out; empty if it isn't."""
    tp, shared = int(row["tp_size"]), int(row["attention_dp_size"] or 1)
    parts, whole = int(row["moe_tp_size"]), int(row["moe_ep_size"])
    if tp * shared > MOST or tp * shared != parts * whole:
        return "degrees that a system of eight GPUs lacks, or that disagree with those of the experts"
    if shared > 1 or min(parts, whole) > 1:
        return "splits that the product doesn't plan"
    if float(row["silicon_ttft_ms"]) >= LATEST_MS:
        return "times to first token of ten seconds and more"
    return ""


def _row(row: Mapping[str, str]) -> Row:
    return Row(Aggregated.of(row), int(row["moe_ep_size"]) > 1)


def predict(group: Group, rows: Sequence[Row], source: str, time: EngineTime | None = None) -> dict[str, Times]:
    """What a source predicts for each row, with an engine's time instead of that of its preset if there is one."""
    predicted = {}
    for row in rows:
        of = profile(group, source, row.served.tp, row.expert_parallel)
        spec = group.spec(row.expert_parallel)
        served = of if time is None else time.of(of)
        predicted[row.served.name] = predict_clients(row.served, spec, served, group.kv_dtype)
    return predicted


def calibrate(group: Group, rows: Sequence[Row]) -> tuple[EngineTime, list[Row]]:
    """The engine's time by every tenth row, and the rows that share no configuration with those."""
    known = tenth([row.served for row in rows])
    of = {row.served.name: row for row in rows}

    def predicted(served: Aggregated, time: EngineTime) -> Times:
        return predict(group, [of[served.name]], SOURCES[1], time)[served.name]

    seen = {_configuration(of[served.name]) for served in known}
    return calibrated(known, predicted), [row for row in rows if _configuration(row) not in seen]


def _configuration(row: Row) -> tuple[int, bool, int, int, int]:
    served = row.served
    return served.tp, row.expert_parallel, served.clients, served.input, served.output


def peer(source: str) -> dict[str, Times]:
    """aiconfigurator's own estimates: from a file, or from an environment that has it."""
    if source.endswith(".jsonl"):
        text = Path(source).read_text(encoding="utf-8")
    else:
        script = Path(__file__).with_name("silicon_peer.py")
        text = subprocess.run(
            [source, str(script), "--experts"], check=True, stdout=subprocess.PIPE, text=True, cwd="/"
        ).stdout
    return {row["id"]: (row["ttft_ms"], row["tpot_ms"]) for row in map(json.loads, text.splitlines())}


def errors(rows: Sequence[Row], predicted: Mapping[str, Times]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """[rows, 2]: relative errors of TTFT and TPOT, of the rows with an answer."""
    return np.array(
        [
            np.array(predicted[r.served.name]) / (r.served.ttft_ms, r.served.tpot_ms) - 1
            for r in rows
            if r.served.name in predicted
        ]
    ).reshape(-1, 2)


def line(title: str, rows: Sequence[Row], predicted: Mapping[str, Times]) -> str:
    """Mean absolute errors, and their signed means."""
    of = errors(rows, predicted)
    if not len(of):
        return f"    {title:34} no answers"
    size, sign, median = np.abs(of).mean(axis=0), of.mean(axis=0), np.median(np.abs(of), axis=0)
    tpot, ttft = (f"{size[i]:6.1%} ({sign[i]:+6.1%}), median {median[i]:6.1%}" for i in (1, 0))
    return f"    {title:34} {len(of):4} rows   TPOT {tpot}   TTFT {ttft}"


def report(rows: Sequence[Row], predicted: Mapping[str, Mapping[str, Times]]) -> None:
    """Print the errors of each source, and of ours on the rows that the peer answers too."""
    for source in SOURCES:
        if source in predicted:
            print(line(source, rows, predicted[source]))
    theirs = predicted.get(SOURCES[3], {})
    both = [row for row in rows if row.served.name in theirs]
    if 0 < len(both) < len(rows):
        for source in SOURCES[:3]:
            print(line(f"{source}, the peer's rows", both, predicted[source]))


def main() -> None:
    """Print the errors of each group and of all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="the interpreter, or the file, with aiconfigurator's own estimates")
    parser.add_argument("--lines", type=Path, help="write every prediction to this file of JSON lines")
    arguments = parser.parse_args()
    theirs = peer(arguments.peer) if arguments.peer else {}
    groups, left_out = read()
    every: dict[str, dict[str, Times]] = defaultdict(dict)
    everything = []
    print("mean absolute errors (signed means), medians")
    for group, rows in groups.items():
        time, others = calibrate(group, rows)
        print(f"{group.model} {group.system} {group.engine} {group.dtype}, KV in {group.kv_dtype}: {len(others)} rows")
        names = [f"TP{r.tp} {r.input}/{r.output} x{r.clients}" for r in tenth([row.served for row in rows])]
        if names:
            print(f"    calibrated: {time.text}; by {', '.join(names)}")
        predicted = {source: predict(group, others, source) for source in (SOURCES[0], SOURCES[2])}
        predicted[SOURCES[1]] = predict(group, others, SOURCES[1], time)
        if theirs:
            named = {row.served.name for row in others}
            predicted[SOURCES[3]] = {name: times for name, times in theirs.items() if name in named}
        report(others, predicted)
        everything += others
        for source, of in predicted.items():
            every[source] |= of
    print(f"all {len(everything)} rows")
    report(everything, every)
    print(f"left out: {'; '.join(f'{count} rows with {reason}' for reason, count in left_out.items())}")
    if arguments.lines:
        lines = [
            json.dumps({"source": source, "id": name, "times": times})
            for source, of in every.items()
            for name, times in of.items()
        ]
        arguments.lines.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
