"""The bound that a server keeps: `exegpt serve` under loads below and above the goodput that it was found to have.

The server measures this machine, searches its schedule and says which goodput it predicts; only then load is sent, by
`exegpt bench serve`. At 80 % of that goodput 99 % of the requests should meet the bound; at 200 %, 99 % of the accepted
ones, and they should be as many as 90 % of the goodput. After a burst, a client that waits as long as it is told should
be accepted at its first retry. Exit code 1 where one doesn't hold. Beside each load: by how much the starts and ends
that were predicted at arrival are off, half of them and nine in ten of them at most.

    python -m benchmarks.serving_bound                       # three seeds of five minutes each: 45 minutes
    python -m benchmarks.serving_bound --seconds 60 --seeds 1
    python -m benchmarks.serving_bound --model DIR --device cuda --dtype bf16    # on a GPU
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.servers import SIZES, schedule_of, tuned_server

MET, ACCEPTED, RETRIED = 0.99, 0.9, 0.8
"""Shares that should be reached: of requests in time, of the goodput, of retries that are accepted."""
HEAD = (
    f"{'load':14} {'sent':>6} {'429':>6} {'fail':>5} {'done/s':>8} {'of it':>7} {'in time':>7} {'p99 s':>7} lag ms cpu"
    f" {'start off s':>16} {'end off s':>16}"
)


def start_load(url: str, rate: float, seconds: float, seed: int, options: list[str]) -> "subprocess.Popen[str]":
    """Begin to send requests at a rate."""
    command = [sys.executable, "-m", "exegpt", "bench", "serve", "--url", url, "--rate", f"{rate:.4f}/s", "--json"]
    command += ["--duration", f"{seconds:g}s", "--seed", str(seed), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def measured(load: "subprocess.Popen[str]") -> dict[str, Any]:
    """What came of it."""
    run: dict[str, Any] = json.loads(load.communicate()[0])["runs"][0]
    return run


def errors(log: Path, since: int, name: str) -> str:
    """Median and 90th percentile of a prediction's error without its sign, in seconds: of the requests in a server's
    log from its byte `since` on.
    """
    events = [json.loads(line) for line in log.read_bytes()[since:].splitlines() if line.startswith(b"{")]
    off = sorted(abs(event[name]) for event in events if event["event"] == "request" and name in event)
    return f"{off[len(off) // 2]:.2f} p90 {off[len(off) * 9 // 10]:.2f}" if off else "none"


def row(name: str, run: dict[str, Any], goodput: float, off: list[str]) -> str:
    """A line of the table."""
    met = run["goodput_seq_s"] / run["throughput_seq_s"] if run["throughput_seq_s"] else 0.0
    p99 = run["latency"]["p99"] or 0.0
    return (
        f"{name:14} {run['requests']:6} {run['rejected']:6} {run['failed']:5} {run['throughput_seq_s']:8.2f} "
        f"{run['throughput_seq_s'] / goodput:7.1%} {met:7.2%} {p99:7.2f} {1e3 * run['client']['send_lag']['p99']:6.1f} "
        f"{run['client']['cpu_share']:6.1%} "
        f"{off[0]:>16} {off[1]:>16} {'' if run['valid'] else 'invalid: ' + '; '.join(run['warnings'])}"
    )


def judge(run: dict[str, Any], goodput: float, overloaded: bool) -> bool:
    """Whether a run has what it should."""
    met = run["goodput_seq_s"] >= MET * run["throughput_seq_s"]
    if overloaded:
        return met and run["throughput_seq_s"] >= ACCEPTED * goodput and not run["failed"]
    return met and not run["failed"] and run["rejected"] <= (1 - MET) * run["requests"]


def burst(url: str, goodput: float, seed: int, seconds: float, options: list[str]) -> tuple[int, int]:
    """After a burst, with fresh load behind it: how many retries there were, and how many were accepted."""
    first = start_load(url, 2 * goodput, seconds, seed, [*options, "--retry", "1"])
    time.sleep(seconds)
    fresh = start_load(url, 0.6 * goodput, seconds, seed + 1, options)
    run = measured(first)
    measured(fresh)
    return run["retries"], run["retries"] - run["rejected"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bound", default="6s")
    parser.add_argument("--workload", default="T")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--burst-seconds", type=float, default=30.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", type=Path, help="a model's directory, instead of one with random weights")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="fp32", help="of weights, keys and values")
    asked = parser.parse_args()
    options, held = ["--workload", asked.workload, "--latency-bound", asked.bound], True
    served = ["--pinned", "--device", asked.device, "--dtype", asked.dtype]
    with (
        tempfile.TemporaryDirectory() as directory,
        tuned_server(Path(directory), asked.bound, asked.workload, asked.model or SIZES, *served) as (url, log),
    ):
        found = schedule_of(url)
        goodput = found["goodput_seq_s"]
        print(f"schedule: {found['schedule']['policy']}, predicted goodput {goodput:.2f}/s within {asked.bound}")
        print(HEAD)
        for share in (0.8, 2.0):
            for seed in range(asked.seeds):
                since = log.stat().st_size
                run = measured(start_load(url, share * goodput, asked.seconds, seed, options))
                off = [errors(log, since, name) for name in ("wait_error_s", "end_error_s")]
                print(row(f"{share:.0%} seed {seed}", run, goodput, off), flush=True)
                held &= run["valid"] and judge(run, goodput, share > 1)
        retries, accepted = burst(url, goodput, 10, asked.burst_seconds, options)
        print(f"after a burst: {accepted} of {retries} first retries accepted ({accepted / max(1, retries):.0%})")
        held &= accepted >= RETRIED * retries
        print(json.dumps(schedule_of(url).get("observed")))
    raise SystemExit(0 if held else 1)


if __name__ == "__main__":
    main()
