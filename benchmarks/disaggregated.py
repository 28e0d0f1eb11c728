"""Prefill replicas beside decode replicas: predicted beside measured ratios to equal replicas.

    python -m benchmarks.disaggregated [--data ../shared/data]

`measured/llmd_2025/pd_exp7.csv` has vLLM's times under llm-d with one or two prefill replicas and a decode replica,
and with as many replicas that do both. It names neither the model nor the degrees. Llama-3.1-8B on one device a replica
is assumed: larger models on fewer devices than a node could not prefill 3.6 prompts of 8,000 tokens/s within 250 ms.
What is compared are ratios. Nothing is fitted to these rows.
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np

from xcore.specs.bound import ALL_REQUESTS
from xcore.specs.prefill_decode import PrefillDecode
from xcore.specs.request_times import RequestTimesColumns
from xcore.specs.schedule import Schedule
from xscheduler.goodput import RateBounds
from xscheduler.prefill_decode_search import DECODE_BUDGET, DECODE_SEQUENCES, PREFILL_SEQUENCES, PrefillDecodeQuestion
from xscheduler.rate_sample import Arrivals
from xscheduler.replica_layout import replica_layouts
from xscheduler.settings import Setting, find_setting
from xsimulator.replay.compiled import Replicas, RequestArrays
from xsimulator.replay.prefill_decode_replay import hand_over, in_turns

DEVICES = {"A100": "A100-SXM-80GB", "H100": "H100-SXM"}
MODEL, SEEDS = "llama-3.1-8b", 20
BUDGET = 8192
"""Tokens per iteration of vLLM's server on these devices."""
SPLIT, EQUAL = {"llm-d-1p1d": (1, 1), "llm-d-2p1d": (2, 1)}, {"vllm-2replicas": 2, "vllm-3replicas": 3}
"""Replicas of both sides, and replicas that do both, by deployment."""


def measured(path: Path) -> dict[tuple[str, str], dict[str, float]]:
    """Return the means over the runs of each (device, deployment)."""
    runs: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    with path.open() as file:
        for row in csv.DictReader(file):
            runs[row["gpu"], row["deployment"]].append(row)
    names = ("isl", "osl", "num_prompts", "request_rate", "burstiness", "mean_ttft_ms", "mean_tpot_ms", "p99_itl_ms")
    return {key: {name: fmean(float(row[name]) for row in rows) for name in names} for key, rows in runs.items()}


def requests_of(run: Mapping[str, float], seed: int) -> RequestArrays:
    """Return requests with vLLM's arrivals: gaps of a gamma distribution whose shape is the burstiness."""
    shape, count = run["burstiness"], round(run["num_prompts"])
    gaps = np.random.default_rng(seed).gamma(shape, 1 / (run["request_rate"] * shape), count)
    sizes = np.full(count, round(run["isl"])), np.full(count, round(run["osl"]))
    inputs, outputs = (size.astype(np.float64) for size in sizes)
    return RequestArrays(np.cumsum(gaps), inputs, outputs, np.ones(count))


def replayed(setting: Setting, deployment: str, run: Mapping[str, float], seed: int) -> tuple[float, float]:
    """Return the mean time to first token and per output token in seconds.

    The deployment `random-N` has N replicas that do both, to which requests go at random.
    """
    replicas, sides, requests = Replicas(setting.profile), SPLIT.get(deployment), requests_of(run, seed)
    arrivals = Arrivals.poisson(setting.workload, setting.model.longest_request, count=1000)
    question = PrefillDecodeQuestion(setting, arrivals, RateBounds(None), ALL_REQUESTS)
    (layout,) = (one for one in replica_layouts(setting, {}) if one.devices == 1)
    both = question.engine(layout, BUDGET, PREFILL_SEQUENCES, only_prompts=False)
    prefill = question.engine(layout, BUDGET, PREFILL_SEQUENCES, only_prompts=True)
    decode = question.engine(layout, DECODE_BUDGET, DECODE_SEQUENCES, only_prompts=False)
    assert both and prefill and decode
    if sides:
        plan = PrefillDecode(replace(prefill, replicas=sides[0]), replace(decode, replicas=sides[1]))
        handed = hand_over(plan, setting.profile, replicas, requests)
        assert handed
        first, finished = handed.first, handed.finished
    elif deployment in EQUAL:
        served = in_turns(replace(both, replicas=EQUAL[deployment]), requests, replicas)
        assert served
        first, finished = served.first, served.finished
    else:
        first, finished = at_random(int(deployment.partition("-")[2]), both, requests, replicas, seed)
    times = RequestTimesColumns(requests.outputs, requests.arrivals, requests.arrivals, first, finished)
    latencies = times.latencies("arrival")
    return float(latencies["ttft"].mean()), float(latencies["tpot"].mean())


def at_random(
    count: int, schedule: Schedule, requests: RequestArrays, replicas: Replicas, seed: int
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Return when the first and the last token come out, if each request goes to one of `count` replicas at random."""
    chosen = np.random.default_rng([seed, 1]).integers(count, size=len(requests.arrivals))
    first, finished = np.empty((2, len(chosen)))
    for number in range(count):
        assigned = chosen == number
        columns = requests.arrivals, requests.inputs, requests.outputs, requests.flags
        served = replicas.serve(schedule, RequestArrays(*(column[assigned] for column in columns)))
        assert served
        first[assigned], finished[assigned] = served.first, served.finished
    return first, finished


def compared(device: str, split: str, equal: str, runs: Mapping[tuple[str, str], dict[str, float]]) -> list[float]:
    """Print the ratios of a deployment's times to those of equal replicas; return their errors."""
    run, other = runs[device, split], runs[device, equal]
    setting = find_setting(MODEL, f"4x{DEVICES[device]}", f"{run['isl']:.0f}/{run['osl']:.0f}", "roofline")
    ours, theirs, at_random = (
        np.mean([replayed(setting, name, rows, seed) for seed in range(SEEDS)], axis=0)
        for name, rows in ((split, run), (equal, other), (f"random-{equal[5]}", other))
    )
    texts, errors = [], []
    for place, figure in enumerate(("mean_ttft_ms", "mean_tpot_ms")):
        ratio, seen = ours[place] / theirs[place], run[figure] / other[figure]
        errors.append(ratio / seen - 1)
        texts.append(
            f"{figure[5:9].upper()} {1e3 * ours[place]:.0f} and {1e3 * theirs[place]:.0f} ms (measured "
            f"{run[figure]:.0f} and {other[figure]:.0f}), ratio {ratio:.2f}, measured {seen:.2f}: {errors[-1]:+.0%}; "
            f"replicas chosen at random {at_random[place] / theirs[place]:.2f}"
        )
    print(f"{device} {split[6:]} and {equal[5:]}: {'; '.join(texts)}")
    gaps = f"{run['p99_itl_ms']:.0f} and {other['p99_itl_ms']:.0f} ms"
    print(f"  measured 99th percentile between tokens: {gaps}")
    return errors


def main() -> None:
    """Print each ratio beside the measured one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[1] / "../shared/data")
    runs = measured(parser.parse_args().data / "measured/llmd_2025/pd_exp7.csv")
    pairs = ("llm-d-1p1d", "vllm-2replicas"), ("llm-d-2p1d", "vllm-3replicas")
    errors = np.array([compared(device, *pair, runs) for device in DEVICES for pair in pairs])
    largest = np.abs(errors).max(axis=0)
    print(f"largest errors of the ratios: {largest[0]:.0%} of TTFT, {largest[1]:.0%} of TPOT (goal: 15%)")


if __name__ == "__main__":
    main()
