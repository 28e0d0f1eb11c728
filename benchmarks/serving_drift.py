"""Lengths that drift under load: `exegpt serve` finds other schedules while it serves, and loses nothing.

As many requests as come in two hours at two a second, in stretches of different lengths at a share of the goodput that
was found for the first ones. Exit code 1 where a request fails or is lost, or where the server has changed its schedule
fewer than two times.

    python -m benchmarks.serving_drift
    python -m benchmarks.serving_drift --requests 7200   # beside other work the searches take longer than its stretches
"""

import argparse
import sys
import tempfile
import urllib.request
from pathlib import Path

from benchmarks.model_sizes import ModelSizes
from benchmarks.servers import schedule_of, tuned_server
from benchmarks.serving_bound import measured, start_load

SIZES = ModelSizes(layers=4, hidden=256, heads=4, kv_heads=2, ffn=704, vocab=2000, context=1024)
BOUND = "4s"
STRETCHES = "128/32", "32/96", "256/24", "64/64", "128/32"
SHARE = 0.5
LEAST = 2


def reschedules(url: str) -> int:
    """How often the server has changed its schedule."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return round(sum(float(line.split()[1]) for line in lines if line.startswith("exegpt_reschedules_total")))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=14400)
    asked = parser.parse_args()
    whole = True
    with (
        tempfile.TemporaryDirectory() as directory,
        tuned_server(Path(directory), BOUND, STRETCHES[0], SIZES) as (url, _),
    ):
        rate = SHARE * schedule_of(url)["goodput_seq_s"]
        seconds = asked.requests / len(STRETCHES) / rate
        print(f"{rate:.1f} requests/s of each length for {seconds:.0f} s")
        for number, lengths in enumerate(STRETCHES):
            run = measured(start_load(url, rate, seconds, number, ["--workload", lengths, "--latency-bound", BOUND]))
            whole &= not run["failed"] and run["completed"] + run["rejected"] == run["requests"]
            enforced, met = schedule_of(url)["schedule"], run["goodput_seq_s"] / max(1e-9, run["throughput_seq_s"])
            print(
                f"{lengths:>8}: {run['requests']:5} sent, {run['completed']:5} answered, {met:7.2%} of them in time, "
                f"{run['rejected']:4} rejected, {run['failed']} failed; {reschedules(url)} changes so far, now "
                f"{enforced['policy']} for outputs of {enforced['workload']['output']['lengths'][-1]} at most",
                flush=True,
            )
        changes = reschedules(url)
    sys.exit(not whole or changes < LEAST)


if __name__ == "__main__":
    main()
