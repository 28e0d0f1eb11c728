"""Tokens per second on this machine: our policies beside transformers' `generate` and its continuous batching.

Same weights, same requests (task T's lengths), same run, two threads; WAA, whose sides are disaggregated, on two ranks
of one thread each. Ours run unbounded and once more under static's 70th-percentile latency; the peers are unbounded.
Then each phase's share of what the machine's two rates allow, of the ranks of what they allow each of both while both
compute.

    python -m benchmarks.cpu_policies
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.job import measure_ranks, run_all
from exegpt.api import peers
from exegpt.api.demo import create_demo_model
from xcore.console.schedule_text import schedule_text
from xcore.duration import format_duration
from xcore.requests.request import Request
from xcore.requests.requests import random_requests
from xcore.specs.bound import PAPER_BOUND
from xcore.specs.model import ModelSpec
from xcore.specs.request_times import summarise
from xcore.specs.schedule import Schedule
from xcore.specs.timeline import Timeline
from xprofiler import machine, store
from xprofiler.measure import measure_profile
from xrunner.core.engine import Engine
from xrunner.models import load_model
from xscheduler.setting_search import search_schedule
from xscheduler.settings import Setting, find_setting

PEER_BATCHES = (16, 64)
RANKS = 2
"""Ranks of WAA: one for each side."""
_LEAST_MEMORY = 0.01
"""The least share of the ranks' memory: less has no room for the weights."""


@dataclass(frozen=True)
class Row:
    """One way of serving the requests."""

    name: str
    setting: str
    tokens_s: float
    """Useful output tokens per second, the median of the runs."""
    latency_s: float | None = None
    """The bound's sequence's."""
    bound_s: float | None = None


@dataclass(frozen=True)
class Share:
    """The share of the machine's limit that one phase reaches."""

    name: str
    phase: str
    gflop_s: float
    gbyte_s: float
    share: float
    """The time that the machine's rates allow over the time it took."""


def static_bound(setting: Setting, most: int) -> float:
    """The 70th percentile of static batching's latencies over batches in multiples of four (paper section 7.1)."""
    latencies = []
    for batch in range(4, most + 1, 4):
        answer = search_schedule(setting, None, policies=("static",), fixed={"encode_batch": batch})
        if answer.estimate and answer.estimate.latency_s:
            latencies.append(answer.estimate.latency_s)
    return float(f"{statistics.quantiles(latencies, n=10)[6]:.3g}")


def run_ours(
    model: Any, schedules: list[Schedule], requests: list[Request], runs: int
) -> tuple[list[Row], list[Timeline]]:
    """Each schedule's median run; the schedules take turns."""
    reports: list[list[Any]] = [[] for _ in schedules]
    for _ in range(runs):
        for mine, schedule in zip(reports, schedules, strict=True):
            mine.append(Engine(model, schedule).run(requests))
    return _medians(schedules, reports)


def _medians(schedules: Sequence[Schedule], runs: Sequence[Sequence[Any]]) -> tuple[list[Row], list[Timeline]]:
    """The median one of each schedule's runs, which have `seconds`, `served` and a `timeline`."""
    rows, timelines = [], []
    for mine, schedule in zip(runs, schedules, strict=True):
        middle = sorted(mine, key=lambda r: r.seconds)[(len(mine) - 1) // 2]
        measured = summarise(middle.served, middle.seconds, schedule.meaning)
        text = schedule_text(schedule).split(" ", 1)[1]
        rows.append(Row(schedule.policy, text, measured.throughput_tok_s, measured.latency_s, schedule.latency_bound_s))
        timelines.append(middle.timeline)
    return rows, timelines


def disaggregated(directory: Path, workload: str, bound_s: float | None, most: int) -> Schedule | None:
    """WAA's best schedule on the ranks with at most so many residents; None where there is none within the bound.

    Where prompts are encoded faster than their outputs are decoded, memory alone limits how many are resident: the most
    memory is given with which they are not more.
    """
    cluster, profile = measure_ranks(directory, RANKS)
    share = 1.0
    while share > _LEAST_MEMORY:
        setting = find_setting(str(directory), str(cluster), workload, str(profile), memory_fraction=share)
        schedule = search_schedule(setting, bound_s, policies=("waa-c", "waa-m"), most_resident=most).schedule
        if schedule:
            return schedule
        share *= 0.98
    print(
        f"WAA: no schedule has at most {most} residents and a latency of at most {format_duration(bound_s)}",
        file=sys.stderr,
    )
    return None


def run_disaggregated(
    directory: Path, schedules: Sequence[Schedule], requests: Sequence[Request], runs: int
) -> tuple[list[Row], list[Timeline], tuple[float, float]]:
    """Each schedule's median run on the ranks, and each rank's FLOP/s and bytes/s while all compute."""
    folder = directory.parent / f"ranks-{RANKS}"
    turns = [run_all(directory, schedules, requests, RANKS, 1, folder) for _ in range(runs)]
    rates = statistics.median(turn.flops_s for turn in turns), statistics.median(turn.bytes_s for turn in turns)
    return *_medians(schedules, list(zip(*(turn.runs for turn in turns), strict=True))), rates


def run_peers(directory: Path, requests: list[Request]) -> list[Row]:
    """Both peers at each of their batch sizes."""
    model = peers.load(directory)
    useful = sum(r.max_tokens for r in requests)
    rows = []
    for name, call in (("generate, static", peers.generate_static), ("continuous batching", peers.continuous)):
        for batch in PEER_BATCHES:
            run = call(model, requests, batch)
            if sum(map(len, run.outputs)) != useful:
                raise SystemExit(f"{name} made {sum(map(len, run.outputs))} tokens, not {useful}")
            latency_s = summarise(run.served, run.seconds, PAPER_BOUND).latency_s
            rows.append(Row(f"transformers {name}", f"at most {batch}", run.tokens_s, latency_s))
            print(f"{rows[-1].name} {batch}: {rows[-1].tokens_s:.0f} tok/s", file=sys.stderr)
    return rows


def shares(
    spec: ModelSpec, name: str, timeline: Timeline, context: float, flops_s: float, bytes_s: float
) -> list[Share]:
    """FLOPs and bytes of each phase over its time: weights are read once an iteration, the cache once a token.

    `context` is the mean context of a decoding sequence. An iteration can't be shorter than its bytes over the
    bandwidth, nor than its FLOPs over the matrix rate.
    """
    matrices = sum(n * k for n, k in spec.layer_matrices())
    head = spec.vocab * spec.hidden
    weights = 4.0 * (spec.layers * matrices + head)
    measured = []
    for phase in ("encode", "decode", "mixed"):
        spans = [s for s in timeline.spans if s.phase == phase]
        if not spans:
            continue
        seconds = sum(s.end_s - s.start_s for s in spans)
        tokens, rows = sum(s.tokens for s in spans), sum(s.sequences for s in spans)
        seen = context if phase != "encode" else tokens / max(rows, 1) / 2
        flops = 2.0 * tokens * spec.layers * matrices + 2.0 * rows * head
        flops += 4.0 * tokens * seen * spec.layers * spec.heads * spec.head_size
        cache = spec.layers * spec.kv_bytes(1, "fp32") * (rows * seen if phase != "encode" else tokens)
        moved = len(spans) * weights + cache
        limit = max(flops / flops_s, moved / bytes_s)
        measured.append(Share(name, phase, flops / seconds / 1e9, moved / seconds / 1e9, limit / seconds))
    return measured


def main() -> None:
    """Run everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--most", type=int, default=64, help="sequences decoded at once, at most, for ours")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workload", default="T")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=Path("exegpt-demo"), help="where the demo's model is")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(args.threads)
    directory = create_demo_model(args.dir, 0)
    model = load_model(directory)
    if store.find(model.spec, "fp32", machine.provenance()) is None:
        measure_profile(directory)
    setting = find_setting(str(directory), "local", args.workload, device="cpu")
    requests = random_requests(
        setting.workload.draw(args.requests, args.seed, model.spec.longest_request), model.spec.vocab, args.seed
    )
    bound = static_bound(setting, args.most)
    unbounded, bounded = (
        [a.schedule for a in search_schedule(setting, b, most_resident=args.most).alternatives if a.schedule]
        for b in (None, bound)
    )
    ours, timelines = run_ours(model, [*unbounded, *bounded], requests, args.runs)
    flops_s, bytes_s = machine.matrix_flops_s(), machine.read_bandwidth_bytes_s()
    context = setting.workload.input.mean + setting.workload.output.mean / 2
    reached = [
        share
        for row, timeline in zip(ours[: len(unbounded)], timelines, strict=False)
        for share in shares(model.spec, row.name, timeline, context, flops_s, bytes_s)
    ]
    sides = [
        schedule
        for schedule in (disaggregated(directory, args.workload, b, args.most) for b in (None, bound))
        if schedule
    ]
    rows, timelines, rates = run_disaggregated(directory, sides, requests, args.runs)
    ours += rows
    for row, timeline in zip(rows, timelines, strict=True):
        if row.bound_s is None:
            reached += shares(model.spec, row.name, timeline, context, *rates)
    theirs = [] if args.no_peers else run_peers(directory, requests)
    document = {
        "requests": len(requests),
        "input_tokens": sum(len(r.prompt_ids) for r in requests),
        "output_tokens": sum(r.max_tokens for r in requests),
        "threads": args.threads,
        "matrix_flops_s": flops_s,
        "read_bandwidth_bytes_s": bytes_s,
        "rank_matrix_flops_s": rates[0],
        "rank_read_bandwidth_bytes_s": rates[1],
        "rows": [asdict(row) for row in [*ours, *theirs]],
        "shares": [asdict(share) for share in reached],
        "ratios": ratios(ours, theirs),
    }
    if args.json:
        print(json.dumps(document, indent=2))
    else:
        show(document)


def ratios(ours: list[Row], theirs: list[Row]) -> dict[str, float]:
    """The comparisons that the table is for."""

    def best(rows: list[Row]) -> float:
        return max((row.tokens_s for row in rows), default=0.0)

    free, held = [r for r in ours if r.bound_s is None], [r for r in ours if r.bound_s is not None]
    ratios_by_name = {}
    if theirs:
        ratios_by_name["ours / best peer"] = best(free) / best(theirs)
        ratios_by_name["ours under static's bound / best peer"] = best(held) / best(theirs)
    for name, rows in (("unbounded", free), ("under static's 70th-percentile latency", held)):
        rra, static = (best([r for r in rows if r.name == policy]) for policy in ("rra", "static"))
        if static:
            ratios_by_name[f"rra / static, {name}"] = rra / static
    return ratios_by_name


def show(document: dict[str, Any]) -> None:
    """Print the tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120)
    title = "{requests} requests, {input_tokens} input and {output_tokens} output tokens, {threads} threads"
    table = Table("", "setting", "tok/s", "bound", "latency", title=title.format(**document))
    for row in document["rows"]:
        bound = "∞" if row["bound_s"] is None else f"{row['bound_s']:.3g} s"
        latency = "–" if row["latency_s"] is None else f"{row['latency_s']:.2f} s"
        table.add_row(row["name"], row["setting"], f"{row['tokens_s']:.0f}", bound, latency)
    console.print(table)
    rates = document["matrix_flops_s"] / 1e9, document["read_bandwidth_bytes_s"] / 1e9
    title = "The machine: {:.0f} GFLOP/s in matrix products, {:.1f} GB/s read".format(*rates)
    rates = document["rank_matrix_flops_s"] / 1e9, document["rank_read_bandwidth_bytes_s"] / 1e9
    title += "; each of two ranks: {:.0f} and {:.1f}".format(*rates)
    table = Table("policy", "phase", "GFLOP/s", "GB/s", "share of the limit", title=title)
    for share in document["shares"]:
        table.add_row(
            share["name"],
            share["phase"],
            f"{share['gflop_s']:.0f}",
            f"{share['gbyte_s']:.1f}",
            f"{share['share']:.0%}",
        )
    console.print(table)
    for name, ratio in document["ratios"].items():
        print(f"{name}: {ratio:.2f}")


if __name__ == "__main__":
    main()
