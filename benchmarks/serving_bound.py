"""The bound that a server keeps: `exegpt serve` under loads below and above the goodput that it was found to have.

The server measures this machine, searches its schedule and says which goodput it predicts; only then load is sent, by
`exegpt bench serve`. At 80 % of that goodput 99 % of the requests should meet the bound; at 200 %, 99 % of the accepted
ones, and they should be as many as 90 % of the goodput. After a burst, a client that waits as long as it is told should
be accepted at its first retry. Exit code 1 where one doesn't hold.

    python -m benchmarks.serving_bound                       # three seeds of five minutes each: 45 minutes
    python -m benchmarks.serving_bound --seconds 60 --seeds 1
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.bench_serve import ready
from exegpt.models.create import create_model

SIZES = {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1408, "vocab": 8000, "context": 1024}
MET, ACCEPTED, RETRIED = 0.99, 0.9, 0.8
"""Shares that should be reached: of requests in time, of the goodput, of retries that are accepted."""
BURST_S = 30
HEAD = (
    f"{'load':14} {'sent':>6} {'429':>6} {'fail':>5} {'done/s':>8} {'of it':>7} {'in time':>7} {'p99 s':>7} lag ms cpu"
)
STARTS_S = 180


@contextmanager
def tuned_server(directory: Path, bound: str, workload: str, threads: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """URL of a server that has searched its schedule, and what it says of that."""
    model, port = directory / "model", 8765
    create_model(model, "llama", **SIZES, seed=1)
    command = [sys.executable, "-m", "exegpt", "serve", "-m", str(model), "-l", bound, "-w", workload]
    command += ["--port", str(port), "--threads", str(threads), "--pinned"]
    url, log = f"http://127.0.0.1:{port}", directory / "server.log"
    with log.open("w") as written:
        server = subprocess.Popen(command, stdout=written, stderr=written)
        try:
            until = time.monotonic() + STARTS_S
            while not ready(url):
                if server.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"The server doesn't start: {log.read_text()[-2000:]}")
                time.sleep(0.2)
            yield url, schedule_of(url)
        finally:
            server.terminate()
            server.wait(90)


def schedule_of(url: str) -> dict[str, Any]:
    """What the server says of its schedule."""
    with urllib.request.urlopen(f"{url}/schedule", timeout=10) as answer:
        document: dict[str, Any] = json.load(answer)
    return document


def start_load(url: str, rate: float, seconds: float, seed: int, options: list[str]) -> "subprocess.Popen[str]":
    """Begin to send requests at a rate."""
    command = [sys.executable, "-m", "exegpt", "bench", "serve", "--url", url, "--rate", f"{rate:.4f}/s", "--json"]
    command += ["--duration", f"{seconds:g}s", "--seed", str(seed), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def measured(load: "subprocess.Popen[str]") -> dict[str, Any]:
    """What came of it."""
    run: dict[str, Any] = json.loads(load.communicate()[0])["runs"][0]
    return run


def row(name: str, run: dict[str, Any], goodput: float) -> str:
    """A line of the table."""
    met = run["goodput_seq_s"] / run["throughput_seq_s"] if run["throughput_seq_s"] else 0.0
    p99 = run["latency"]["p99"] or 0.0
    return (
        f"{name:14} {run['requests']:6} {run['rejected']:6} {run['failed']:5} {run['throughput_seq_s']:8.2f} "
        f"{run['throughput_seq_s'] / goodput:7.1%} {met:7.2%} {p99:7.2f} {1e3 * run['client']['send_lag']['p99']:6.1f} "
        f"{run['client']['cpu_share']:6.1%} {'' if run['valid'] else 'invalid: ' + '; '.join(run['warnings'])}"
    )


def judge(run: dict[str, Any], goodput: float, overloaded: bool) -> bool:
    """Whether a run has what it should."""
    met = run["goodput_seq_s"] >= MET * run["throughput_seq_s"]
    if overloaded:
        return met and run["throughput_seq_s"] >= ACCEPTED * goodput and not run["failed"]
    return met and not run["failed"] and run["rejected"] <= (1 - MET) * run["requests"]


def burst(url: str, goodput: float, seed: int, options: list[str]) -> tuple[int, int]:
    """After a burst, with fresh load behind it: how many retries there were, and how many were accepted."""
    first = start_load(url, 2 * goodput, BURST_S, seed, [*options, "--retry", "1"])
    time.sleep(BURST_S)
    fresh = start_load(url, 0.6 * goodput, BURST_S, seed + 1, options)
    run = measured(first)
    measured(fresh)
    return run["retries"], run["retries"] - run["rejected"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bound", default="16s")
    parser.add_argument("--workload", default="T")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    options, held = ["--workload", asked.workload, "--latency-bound", asked.bound], True
    with (
        tempfile.TemporaryDirectory() as directory,
        tuned_server(Path(directory), asked.bound, asked.workload, asked.threads) as (url, found),
    ):
        goodput = found["goodput_seq_s"]
        print(f"schedule: {found['schedule']['policy']}, predicted goodput {goodput:.2f}/s within {asked.bound}")
        print(HEAD)
        for share in (0.8, 2.0):
            for seed in range(asked.seeds):
                run = measured(start_load(url, share * goodput, asked.seconds, seed, options))
                print(row(f"{share:.0%} seed {seed}", run, goodput), flush=True)
                held &= run["valid"] and judge(run, goodput, share > 1)
        retries, accepted = burst(url, goodput, 10, options)
        print(f"after a burst: {accepted} of {retries} first retries accepted ({accepted / max(1, retries):.0%})")
        held &= accepted >= RETRIED * retries
        print(json.dumps(schedule_of(url).get("observed")))
    raise SystemExit(0 if held else 1)


if __name__ == "__main__":
    main()
