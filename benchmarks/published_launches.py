"""Launch commands that others published with what they measured: read as they are, and simulated by data sheets.

GPUStack's Performance Lab (vLLM, SGLang; all requests at once) and SGLang's cookbook (a fixed number of clients).
Random prompts have the lengths that the totals give: of equal length in the first, drawn uniformly in the second.
ShareGPT's are drawn from MLPerf's copy. Nothing is fitted to these rows. Left out: speculative decoding, pictures,
other hardware, and settings that aren't modelled; each is counted with its reason.

    python -m benchmarks.published_launches
    python -m benchmarks.published_launches --rows    # each row
"""

import argparse
import csv
import gzip
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.silicon import DATA
from exegpt.api.simulate import simulate
from exegpt.options.simulate import SimulateOptions
from xcore.errors import InputError
from xcore.policies.chunked import ChunkedControl
from xcore.specs.workload import RequestLengths
from xscheduler.launch_command import read_launch

FOLDER = DATA / "measured"
DEVICES = {"H100": "H100-SXM", "H200": "H200-SXM", "B200": "B200", "GB300": "GB300", "A100": "A100-80GB"}


@dataclass(frozen=True)
class Row:
    """One run."""

    source: str
    command: str
    device: str
    requests: tuple[RequestLengths, ...]
    clients: int | None
    """Requests at once; None: all."""
    tokens_s: float
    """Output tokens per second."""

    def group(self) -> tuple[str, str, str]:
        """Source, engine and cluster; InputError for a command that can't be read."""
        launch = read_launch(self.command)
        gpus = math.prod(int(launch.settings.get(name) or 1) for name in ("tp_degree", "stages", "replicas"))
        return self.source, launch.engine, f"{gpus}x{self.device}"

    def error(self) -> float:
        """(predicted - published) / published throughput; InputError where it can't be answered."""
        from xsimulator.replay.event_simulator import replay

        mean = tuple(round(float(np.mean([getattr(r, name) for r in self.requests]))) for name in ("input", "output"))
        options = SimulateOptions(
            command=self.command,
            cluster=self.group()[-1],
            workload=f"{mean[0]}/{mean[1]}",
            profile=["roofline"],
        )
        found = simulate(options)
        schedule = found.schedule
        control = schedule.control
        assert isinstance(control, ChunkedControl), "what these servers run"
        if self.clients and self.clients < control.max_num_seqs:
            schedule = replace(schedule, control=replace(control, max_num_seqs=self.clients))
        seconds = replay(schedule, found.profile, self.requests, timeline=False).seconds
        return sum(r.output for r in self.requests) / seconds / self.tokens_s - 1.0


def read(path: str) -> Iterator[dict[str, str]]:
    """The rows of a file."""
    with (FOLDER / path).open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def sharegpt(number: int, means: tuple[float, float]) -> tuple[RequestLengths, ...]:
    """Lengths of MLPerf's ShareGPT conversations, scaled to these means."""
    with gzip.open(FOLDER / "mlperf" / "lengths_sharegpt-vicuna.csv.gz", "rt", encoding="utf-8") as file:
        rows = [tuple(map(float, (row["input_length"], row["output_length"]))) for row in csv.DictReader(file)]
    lengths = np.array(rows)[np.random.default_rng(0).choice(len(rows), number)]
    scaled = np.maximum(1, np.round(lengths * (np.array(means) / lengths.mean(0)))).astype(int)
    return tuple(RequestLengths(int(i), int(o)) for i, o in scaled)


def totals(row: Mapping[str, str]) -> tuple[int, float, float]:
    """The number of requests and their mean lengths."""
    number = int(float(row["Successful requests"] or 0))
    if not number:
        raise InputError("no totals")
    return number, float(row["Total input tokens"]) / number, float(row["Total generated tokens"]) / number


def device_of(text: str) -> str:
    """The kind of a page's hardware."""
    for name in re.findall(r"GB300|B200|H200|H100|A100", text):
        return DEVICES[name]
    raise InputError("hardware without a data sheet, or none named")


def gpustack(row: Mapping[str, str]) -> Row:
    """A run of GPUStack's; all requests come at once unless a number of clients is given."""
    number, given, made = totals(row)
    random = "random" in row["case"] or (
        not row["case"] and "--dataset-name random" in row["bench"].split("sharegpt")[0]
    )
    alike = (RequestLengths(round(given), max(1, round(made))),) * number
    requests = alike if random else sharegpt(number, (given, made))
    peak = int(
        float(row["Peak concurrent requests"] or 0)
    )  # of fewer clients: the end of one overlaps the next's start
    clients = round(peak / 1.1) if 0 < peak < number else None
    tokens_s = float(row["Output token throughput (tok/s)"])
    return Row("GPUStack", row["command"], device_of(row["hardware"]), requests, clients, tokens_s)


def cookbook(row: Mapping[str, str]) -> Row:
    """A run of SGLang's cookbook."""
    if row["Accept length"] or "speculative" in row["server"]:
        raise InputError("speculative decoding")
    if row["Total input vision tokens"] not in ("", "0"):
        raise InputError("pictures")
    number, given, made = totals(row)
    rng = np.random.default_rng(0)
    drawn = [rng.integers(1, max(2, 2 * round(mean)), number) for mean in (given, made)]
    requests = tuple(RequestLengths(int(i), int(o)) for i, o in zip(*drawn, strict=True))
    clients = int(row["Max request concurrency"] or 0) or None
    tokens_s = float(row["Output token throughput (tok/s)"])
    return Row("SGLang cookbook", row["server"], device_of(row["hardware"]), requests, clients, tokens_s)


def main() -> None:
    """Print the errors by source, engine and device, and why rows are left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", action="store_true", help="print each row")
    arguments = parser.parse_args()
    if not FOLDER.exists():
        raise SystemExit(f"'{FOLDER}' is not there: set EXEGPT_DATA to a folder with published measurements.")
    groups: dict[tuple[str, ...], list[float]] = defaultdict(list)
    left_out: Counter[str] = Counter()
    sources = (("gpustack/performance_lab.csv", gpustack), ("cookbooks/sglang_cookbook.csv", cookbook))
    for path, make in sources:
        for raw in read(path):
            try:
                row = make(raw)
                group, error = row.group(), row.error()
            except InputError as reason:
                left_out[f"{path.partition('/')[0]}: {str(reason).splitlines()[0][:110]}"] += 1
                continue
            groups[group].append(error)
            if arguments.rows:
                print(f"{error:+7.1%} {group[-1]}, clients: {row.clients or 'all'}: {row.command[:140]}", flush=True)
    for name, errors in sorted(groups.items()):
        bias, middle = np.median(errors), np.median(np.abs(errors))
        print(f"{' '.join(name):40} {len(errors):4} rows, median error {middle:6.1%}, bias {bias:+7.1%}")
    for why, number in left_out.most_common():
        print(f"left out {number:4}  {why}")


if __name__ == "__main__":
    main()
