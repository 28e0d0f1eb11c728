"""The closed forms beside a saturated replay: what `xsimulator.estimate` predicts of few residents.

Iteration-level policies, 1 to 16 residents, six workloads, each engine preset. All requests are there from the start;
the replay's first and last fifth are left out.

    python -m benchmarks.steady_state
    python -m benchmarks.steady_state --engine vllm --policy chunked --json rows.json
"""

import argparse
import itertools
import os
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from xcore import document
from xcore.specs.engine_spec import ENGINES
from xcore.specs.estimate import Estimate
from xcore.specs.request_times import RequestTimesColumns
from xcore.specs.schedule import Schedule
from xcore.specs.workload import Workload
from xscheduler.engine_settings import engine_schedule
from xscheduler.settings import Setting, find_setting
from xsimulator import estimate
from xsimulator.replay.compiled import Replicas, RequestArrays

DATA = Path(os.environ.get("EXEGPT_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
AZURE = "azure/AzureLLMInferenceTrace_conv.csv"
WORKLOADS = ("32000/300", "32000/2", "2048/256", "1024/1024", "128/2048", AZURE)
RESIDENTS = (1, 2, 4, 8, 16)
POLICIES = {"orca": {"prefills_per_step": 1}, "chunked": {"max_num_batched_tokens": 2048}}
FIGURES = ("latency", "ttft", "tpot")
LIMITS = {"mean": 0.03, "p99": 0.08}
"""Shares by which a figure may be off."""
BLOCKS = 10**6
"""Of the cache: it never decides."""
TOKENS = 40_000_000
"""Of a replay, about."""


@dataclass(frozen=True)
class Row:
    """One point: (predicted - replayed) / replayed of each figure."""

    policy: str
    engine: str
    workload: str
    residents: int
    errors: dict[str, float]

    def beyond(self, statistic: str) -> list[str]:
        """The figures that are off by more than they may be."""
        return [k for k, e in self.errors.items() if k.endswith(statistic) and abs(e) > LIMITS[statistic]]


def replayed(schedule: Schedule, setting: Setting) -> dict[str, float]:
    """Mean and 99th percentile of each time between a fifth and four fifths of the workload's requests, and the rate of
    their ends, all there from the start.
    """
    drawn = setting.workload.requests or ()
    count = len(drawn)
    nothing = np.zeros(count)
    inputs, outputs = (np.array([getattr(r, side) for r in drawn], dtype=np.float64) for side in ("input", "output"))
    times = Replicas(setting.profile).serve(schedule, RequestArrays(nothing, inputs, outputs, nothing))
    assert times is not None
    kept = slice(count // 5, -(count // 5))
    columns = RequestTimesColumns(
        outputs[kept], nothing[kept], times.started[kept], times.first[kept], times.finished[kept]
    )
    of = columns.latencies("start")
    figures = {f"{name}_mean": float(of[name].mean()) for name in FIGURES if of[name].size}
    figures |= {f"{name}_p99": float(np.percentile(of[name], 99)) for name in FIGURES if of[name].size}
    ends = np.sort(times.finished)[kept]
    return figures | {"throughput": (len(ends) - 1) / (ends[-1] - ends[0])}


def predicted(figures: Estimate) -> dict[str, float | None]:
    """The same figures of an estimate."""
    return {
        "latency_mean": figures.latency_mean_s,
        "ttft_mean": figures.ttft_s,
        "tpot_mean": figures.tpot_s,
        "latency_p99": figures.latency_p99_s,
        "ttft_p99": figures.ttft_p99_s,
        "tpot_p99": figures.tpot_p99_s,
        "throughput": figures.throughput_seq_s,
    }


def rows(
    policies: list[str], engines: list[str], workloads: list[str], residents: list[int], budget: int | None
) -> Iterator[Row]:
    """Every combination that fits into memory."""
    for engine, workload in itertools.product(engines, workloads):
        source = str(DATA / workload) if "/A" in workload else workload
        setting = find_setting("llama-3.1-8b", "1xH100-SXM", source, engine=engine)
        tokens = setting.workload.input.mean + setting.workload.output.mean
        count = int(min(max(TOKENS / tokens, 600), 40_000))
        drawn = setting.workload.without_requests.draw(count, seed=1, context=setting.model.longest_request)
        setting = replace(setting, workload=Workload.from_requests(workload, drawn))  # the draw's luck on both sides
        for policy, n in itertools.product(policies, residents):
            controls = POLICIES[policy] | ({"max_num_batched_tokens": budget} if budget and policy == "chunked" else {})
            schedule = engine_schedule(setting, policy, 1, BLOCKS, 16, max_num_seqs=n, **controls)
            done = replayed(schedule, setting)
            expected = predicted(estimate(schedule, setting.profile))
            errors = {name: (expected[name] or 0.0) / figure - 1 for name, figure in done.items() if figure}
            yield Row(policy, engine, workload, n, errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default=",".join(POLICIES))
    parser.add_argument("--engine", default=",".join(ENGINES))
    parser.add_argument("--workload", default=",".join(w for w in WORKLOADS if w != AZURE or (DATA / AZURE).exists()))
    parser.add_argument("--residents", default=",".join(map(str, RESIDENTS)))
    parser.add_argument("--budget", type=int, help="tokens of chunked's iterations")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = []
    numbers = [int(n) for n in given.residents.split(",")]
    for row in rows(given.policy.split(","), given.engine.split(","), given.workload.split(","), numbers, given.budget):
        found.append(row)
        errors = "  ".join(f"{name} {error:+6.1%}" for name, error in row.errors.items())
        late = row.beyond("mean") + row.beyond("p99")
        print(f"{row.policy:8}{row.engine:14}{Path(row.workload).name[:24]:26}{row.residents:3}  {errors}", end="")
        print(f"  BEYOND: {', '.join(late)}" if late else "", flush=True)
    for name in found[0].errors if found else ():
        off = [abs(row.errors[name]) for row in found if name in row.errors]
        print(f"{name:14} median {statistics.median(off):6.1%}  worst {max(off):6.1%}")
    print(f"{sum(not (r.beyond('mean') + r.beyond('p99')) for r in found)} of {len(found)} points within the limits")
    if given.json:
        document.write_text(given.json, document.dumps([asdict(row) for row in found]))


if __name__ == "__main__":
    main()
