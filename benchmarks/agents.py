"""Agents on `exegpt serve`: mean completion of applications' runs under `gittins` and first come, first served.

Three kinds of applications, 72 % small, 26 % medium and 2 % large as in Hermes, send their calls one after the other to
a small model that runs four requests at once. Demand graphs are learned from other runs. Runs arrive at 0.9 of the rate
at which the same runs would be done if all calls came at once, by the replay. The sizes were fixed before the first
measurement. `exegpt simulate` predicts each measurement from a trace of the same runs and arrivals.

A factor corrects the profile's speed: how much longer 40 of the runs that were learned from, all sent at once, take on
the server than in `exegpt simulate`. It is measured before each load, on the same server; on a quiet machine it is
about 1. The rate follows from the first factor of a seed, each prediction from its own. A machine whose speed changes
within minutes spoils the comparison with the prediction, and is noticed by factors that differ.

The seeds of the measured runs are two, neither of which was used to choose anything. Exit code 1 unless `gittins` is at
least 15 % below first come, first served, and each prediction is within 10 %.

    python -m benchmarks.agents
    python -m benchmarks.agents --runs 60 --seeds 1
"""

import argparse
import asyncio
import json
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.model_sizes import ModelSizes
from benchmarks.servers import orca, started
from exegpt.loadtest.connection import Address, ConnectionPool
from exegpt.loadtest.endpoint import http_request
from exegpt.loadtest.response import Stream
from xcore import document
from xcore.specs.profile import Profile
from xcore.specs.schedule import Schedule
from xcore.specs.workload import RequestLengths
from xmulti.files.call_log import LoggedCall, learn
from xprofiler.profiles import measured_profile
from xrunner.comm.ranks import Ranks
from xrunner.models.device import CPU
from xsimulator.replay.event_simulator import replay

SIZES = ModelSizes(layers=4, hidden=256, heads=4, kv_heads=2, ffn=704, vocab=4000, context=1024)
AT_ONCE, LOAD, RUNS, SEEDS = 4, 0.9, 300, (101, 202)
LEARNED, LEARNED_SEED, CALIBRATION = 400, 7, 40
ORDERS = ("fcfs", "gittins")
GAIN, ERROR = 0.15, 0.10
HEAD = " seed order     runs  factor  measured s  predicted   error to fcfs"
SPREAD_RUN, SPREAD_CALL = 0.5, 0.3
"""Standard deviations of the logarithm of a size: common to a run's calls, and each call's own."""

Unit = tuple[str, int, int, float, dict[str, float]]
"""Name, median input and output tokens (0: not an LLM), median seconds, and the next units with their probabilities."""
SMALL: tuple[Unit, ...] = (
    ("ask", 40, 12, 0, {"search": 0.6, "answer": 0.4}),
    ("search", 0, 0, 0.1, {"answer": 1.0}),
    ("answer", 90, 25, 0, {"end": 1.0}),
)
MEDIUM: tuple[Unit, ...] = (
    ("plan", 60, 40, 0, {"write": 1.0}),
    ("write", 120, 80, 0, {"execute": 0.7, "end": 0.3}),
    ("execute", 0, 0, 0.3, {"write": 0.5, "end": 0.5}),
)
LARGE: tuple[Unit, ...] = (
    ("read", 200, 60, 0, {"read": 0.85, "merge": 0.15}),
    ("merge", 300, 200, 0, {"end": 1.0}),
)
KINDS = {"small": (0.72, SMALL), "medium": (0.26, MEDIUM), "large": (0.02, LARGE)}
"""Each kind's share of the runs, and its units; the first one begins."""


@dataclass(frozen=True)
class Visit:
    """A call of any backend."""

    unit: str
    input: int
    """0: the backend is not an LLM."""
    output: int
    seconds: float


@dataclass(frozen=True)
class AgentRun:
    """A run of an application."""

    kind: str
    visits: tuple[Visit, ...]

    @property
    def calls(self) -> list[tuple[Visit, float]]:
        """The calls of the LLM, each with the seconds of other backends since the one before."""
        calls, pause_s = [], 0.0
        for visit in self.visits:
            if visit.output:
                calls.append((visit, pause_s))
            pause_s = 0.0 if visit.output else pause_s + visit.seconds
        return calls

    def log(self, run: int) -> list[LoggedCall]:
        """Return the lines of a log."""
        names = [*(visit.unit for visit in self.visits), "end"]
        return [
            LoggedCall(self.kind, run, visit.unit, following, visit.input, visit.output)
            if visit.output
            else LoggedCall(self.kind, run, visit.unit, following, seconds=visit.seconds)
            for visit, following in zip(self.visits, names[1:], strict=True)
        ]


def draw_runs(seed: int, count: int) -> list[AgentRun]:
    """Draw runs of all kinds by their shares."""
    rng, shares = random.Random(seed), [share for share, _ in KINDS.values()]
    return [draw_run(rng, kind) for kind in rng.choices([*KINDS], shares, k=count)]


def draw_run(rng: random.Random, kind: str) -> AgentRun:
    """Draw a run of one kind."""
    units = {unit[0]: unit for unit in KINDS[kind][1]}
    own, name, visits = math.exp(rng.gauss(0, SPREAD_RUN)), KINDS[kind][1][0][0], []
    while name != "end":
        _, input, output, seconds, nexts = units[name]
        spread = math.exp(rng.gauss(0, SPREAD_CALL))
        tokens = [max(2, min(480, round(size * spread * own))) if size else 0 for size in (input, output)]
        visits.append(Visit(name, tokens[0], tokens[1], seconds * spread))
        (name,) = rng.choices([*nexts], [*nexts.values()])
    return AgentRun(kind, tuple(visits))


# ---- the load ----


async def measured(url: str, runs: Sequence[AgentRun], arrivals: Sequence[float], vocab: int) -> list[float]:
    """Send all runs' calls, and return the seconds of each run from its arrival to its end."""
    pool, loop = ConnectionPool(Address.of(url)), asyncio.get_running_loop()
    begin_s = loop.time()

    async def one(number: int) -> float:
        await asyncio.sleep(max(0.0, begin_s + arrivals[number] - loop.time()))
        rng = random.Random(number)
        for call, pause_s in runs[number].calls:
            await asyncio.sleep(pause_s)
            body = {
                "prompt": [rng.randrange(300, vocab) for _ in range(call.input)],
                "max_tokens": call.output,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "metadata": {"application": runs[number].kind, "run": str(number), "unit": call.unit},
            }
            answer = Stream()
            await pool.exchange(http_request(pool.address, "/completions", body), answer, 600.0)
            if answer.failure:
                raise SystemExit(f"A call failed: {answer.failure}")
        return loop.time() - begin_s - arrivals[number]

    completions = await asyncio.gather(*map(one, range(len(runs))))
    pool.close()
    return completions


def write_trace(path: Path, runs: Sequence[AgentRun], arrivals: Sequence[float], factor: float) -> None:
    """Write the runs' calls as a trace for `exegpt simulate`, with all times divided by a factor."""
    lines = ["input,output,arrival_s,application,run,unit,after_s"]
    for number, (run, at) in enumerate(zip(runs, arrivals, strict=True)):
        for place, (call, pause_s) in enumerate(run.calls):
            after = f"{pause_s / factor:.6f}" if place else ""
            lines.append(f"{call.input},{call.output},{at / factor:.6f},{run.kind},{number},{call.unit},{after}")
    path.write_text("\n".join(lines) + "\n")


def simulated(directory: Path, trace: Path, order: Sequence[str]) -> dict[str, Any]:
    """Return what `exegpt simulate` predicts."""
    command = [sys.executable, "-m", "exegpt", "simulate", "-s", str(directory / "schedule.json"), "-p"]
    command += [str(directory / "profile.json"), "--replay", str(trace), *order, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    prediction: dict[str, Any] = json.loads(done.stdout)
    return prediction


def slower(url: str, directory: Path) -> float:
    """Return how much longer runs take on a server than in the simulation."""
    runs, trace = draw_runs(LEARNED_SEED, CALIBRATION), directory / "calibration.csv"
    arrivals = [0.0] * len(runs)
    write_trace(trace, runs, arrivals, 1.0)
    expected_s: float = simulated(directory, trace, ())["seconds"]
    return max(asyncio.run(measured(url, runs, arrivals, SIZES.vocab))) / expected_s


def set_up(directory: Path) -> Schedule:
    """Write the model, its profile, the schedule and the demand graphs."""
    SIZES.create(directory / "model", seed=1)
    schedule = orca(directory / "model", AT_ONCE)
    document.write(directory / "schedule.json", schedule)
    document.write(
        directory / "profile.json", measured_profile(directory / "model", "fp32", Ranks(), CPU, "triton").profile
    )
    log = [line for number, run in enumerate(draw_runs(LEARNED_SEED, LEARNED)) for line in run.log(number)]
    (directory / "graphs.json").write_text(json.dumps([document.to_dict(graph) for graph in learn(log)]))
    return schedule


def arrivals_of(directory: Path, schedule: Schedule, runs: Sequence[AgentRun], seed: int, factor: float) -> list[float]:
    """Return Poisson arrivals at `LOAD` of the rate at which all calls at once are done."""
    rows = [RequestLengths(call.input, call.output, 0.0) for run in runs for call, _ in run.calls]
    seconds = replay(schedule, document.read(Profile, directory / "profile.json"), rows, timeline=False).seconds
    rng, at_s, arrivals = random.Random(seed + 1), 0.0, []
    for _ in runs:
        at_s += rng.expovariate(LOAD * len(runs) / (factor * seconds))
        arrivals.append(at_s)
    return arrivals


def main(argv: list[str] | None = None) -> int:
    """Print a line for each seed and order."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), choices=(1, 2))
    options = parser.parse_args(argv)
    kept = True
    with tempfile.TemporaryDirectory(prefix="exegpt-agents-") as name:
        directory = Path(name)
        schedule = set_up(directory)
        print(HEAD)
        for seed in SEEDS[: options.seeds]:
            runs, trace = draw_runs(seed, options.runs), directory / "trace.csv"
            arrivals, means = list[float](), dict[str, float]()
            for order in ORDERS:
                words = ["--order", order]
                words += ["--graphs", str(directory / "graphs.json")] if order == "gittins" else []
                serve = ["-m", str(directory / "model"), "-s", str(directory / "schedule.json"), "--pinned", *words]
                with started(directory, serve) as (url, _):
                    factor = slower(f"{url}/v1", directory)
                    arrivals = arrivals or arrivals_of(directory, schedule, runs, seed, factor)
                    means[order] = fmean(asyncio.run(measured(f"{url}/v1", runs, arrivals, SIZES.vocab)))
                write_trace(trace, runs, arrivals, factor)
                expected_s = factor * simulated(directory, trace, words)["runs"]["completion"]["mean"]
                error, change = means[order] / expected_s - 1, means[order] / means["fcfs"] - 1
                kept = kept and abs(error) <= ERROR and (order == "fcfs" or change <= -GAIN)
                figures = f"{factor:7.3f} {means[order]:11.3f} {expected_s:10.3f} {error:+7.1%} {change:+7.1%}"
                print(f"{seed:5} {order:8} {options.runs:5} {figures}", flush=True)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
