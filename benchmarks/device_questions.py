"""How many of which GPU: whether any cheaper devices than those that `tune --devices` names sustain the rate.

Questions are drawn with a seed: a model, lengths, bounds, a rate, six kinds and their prices. For each layout of a
replica on these kinds (TP x PP in 1, 2, 4 or 8 devices), the largest number of replicas that is cheaper than the answer
is replayed with every schedule of a grid: batches in steps of 1.5, token budgets of 1.25. Fewer replicas sustain less.
A schedule that seems to hold with 8,000 requests is replayed with all 200,000.

    python -m benchmarks.device_questions
    python -m benchmarks.device_questions --questions 5 --seed 1
"""

import argparse
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from exegpt.api.device_offers import DeviceOffers, device_offers
from exegpt.api.tuning import TuneProblem, read_problem
from exegpt.options.tune import TuneOptions
from xscheduler.candidates import Candidates
from xscheduler.open_search import COUNTS, coarse
from xscheduler.replica_layout import RateQuestion, ReplicaLayout, replica_layouts
from xscheduler.replicas_needed import FOLLOWED, searches_of
from xscheduler.space import all_spaces

PRICES = {"A100-80GB": 1.5, "H100-SXM": 2.5, "H200-SXM": 3.3, "L40S": 0.9, "B200": 5.0, "MI300X": 2.3}
"""Prices of a device-hour, which a question multiplies by random factors."""
MODELS = ("llama-3.1-8b", "qwen3-14b", "llama-3.1-70b")
WORKLOADS = ("2048/256", "1024/512", "512/128", "normal(1500,400)/normal(200,60)")
STEPS = (1.5, 1.25)
"""Ratios of the grid's neighbouring values: of batches, and of token budgets."""
WITHIN = 0.01
"""Share by which an answer may cost more than the grid's."""


@dataclass(frozen=True)
class Checked:
    """One question, with what the grid found."""

    text: str
    answer: str
    seconds: float
    cpu_seconds: float
    sustained: bool
    """Whether the answer's schedule sustains the rate."""
    cheaper: str
    """A cheaper layout that sustains the rate; empty if there is none."""
    replays: int


def questions(count: int, seed: int) -> Iterator[TuneOptions]:
    """Yield drawn questions; prices stand in a file that `read_problem` isn't given."""
    draw = random.Random(seed)
    for _ in range(count):
        model = draw.choice(MODELS)
        bounds: tuple[str | None, str | None, str | None] = draw.choice(
            ((draw.choice(("5s", "10s", "20s")), None, None), (None, "2s", draw.choice(("40ms", "80ms"))))
        )
        yield TuneOptions(
            model=model,
            workload=draw.choice(WORKLOADS),
            latency_bound=bounds[0],
            ttft=bounds[1],
            tpot=bounds[2],
            rate=f"{draw.choice((2, 5, 10, 20) if '70b' in model else (5, 20, 50, 100))}/s",
            devices=",".join(PRICES),
        )


def priced(problem: TuneProblem, draw: random.Random) -> TuneProblem:
    """Return the problem with prices near the usual ones."""
    return replace(problem, prices={kind: round(price * draw.uniform(0.7, 1.4), 2) for kind, price in PRICES.items()})


def sustains(layout: ReplicaLayout, replicas: int, asked: RateQuestion) -> tuple[bool, int]:
    """Return whether any schedule of the grid sustains the rate on these replicas, and the number of replays."""
    followed = min(replicas, FOLLOWED)
    rate, replays = asked.rate_seq_s * followed / replicas, 0
    for search in searches_of(layout, followed, asked):
        meter = search.meter
        for space in all_spaces(search.members):
            assert isinstance(space, Candidates)
            axes = [coarse(variable.values, ratio) for variable, ratio in zip(space.variables, STEPS, strict=False)]
            for point in itertools.product(*axes):
                if not search._fits(space, point) or rate > meter.limit(search._steady(space, point)):
                    continue
                schedule = search.schedule(space, point)
                if meter.holds(schedule, rate, COUNTS[0]) and meter.sustains(schedule, rate):
                    return True, replays + meter.replays
        replays += meter.replays
    return False, replays


def cheaper_layout(problem: TuneProblem, offers: DeviceOffers) -> tuple[str, int]:
    """Return a layout that sustains the rate for less than the answer, with its replicas; and the replays."""
    asked, total = offers.asked, 0
    assert offers.best and offers.best.price_hour is not None
    most = offers.best.price_hour / (1 + WITHIN)
    for setting in problem.settings:
        for layout in replica_layouts(setting, {}):
            each = asked.price(layout, 1)
            assert each is not None
            replicas = int(most / each)
            if replicas < 1:
                continue
            held, replays = sustains(layout, replicas, asked)
            total += replays
            if held:
                return f"{replicas} replicas of {layout.name} on {layout.kind}", total
    return "", total


def check(options: TuneOptions, draw: random.Random) -> Checked:
    """Answer a question, and try what is cheaper."""
    began, cpu = time.perf_counter(), time.process_time()
    problem = priced(read_problem(options), draw)
    offers = device_offers(problem)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    bounds = [text for text in (options.latency_bound, options.ttft, options.tpot) if text]
    text = f"{options.model} {options.workload} {'+'.join(bounds)} {options.rate}"
    if not offers.best or not offers.best.rated.tuned.schedule:
        return Checked(text, "none", seconds, cpu_seconds, True, "", 0)
    sustained = offers.best.rated.highest_rate_seq_s >= offers.asked.rate_seq_s
    cheaper, replays = cheaper_layout(problem, offers)
    (needed,) = offers.needed
    answer = f"{needed.cluster.name} ({needed.layout.name}), {needed.price_hour:.3g}/h"
    return Checked(text, answer, seconds, cpu_seconds, sustained, cheaper, replays)


def main() -> None:
    """Print a line for each question, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw, checks = random.Random(arguments.seed), []
    for options in questions(arguments.questions, arguments.seed):
        checks.append(check(options, draw))
        one = checks[-1]
        verdict = f"cheaper: {one.cheaper}" if one.cheaper else "nothing cheaper"
        times = f"{one.seconds:.1f} s, {one.cpu_seconds:.1f} CPU s"
        print(f"{one.text}: {one.answer} in {times}; {verdict} in {one.replays:,} replays", flush=True)
    right = sum(one.sustained and not one.cheaper for one in checks)
    slowest = max(checks, key=lambda one: one.seconds)
    print(
        f"{right} of {len(checks)} answers within {WITHIN:.0%} of the grid; the slowest took {slowest.seconds:.1f} s."
    )


if __name__ == "__main__":
    main()
