"""Joint budgets beside the other methods: 20 scenarios of several models on one cluster.

For each, the factor by which all rates could rise until a model misses its bound, replayed with the same requests under
every method. The rates load the cluster by a rule: a scenario's proportions, times `LOAD` of what the first of `YARDS`
that places its models sustains of them. Exit code 1 where ours is below 0.98 of the others' best anywhere, or more
than 1.02 times it in fewer than five. Answers are appended to --out, and those in it are not asked again. What a model
does on a number of devices is searched once for all scenarios on the same device kind.

    python -m benchmarks.joint_budgets --out joint.jsonl
    python -m benchmarks.joint_budgets --only few
"""

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmulti.plans.demands import ModelDemand, read_demands
from xmulti.plans.model_frontier import Frontiers
from xmulti.plans.planning import METHODS, propose

LEAST, BETTER, OFTEN = 0.98, 1.02, 5
LOAD, YARDS = 0.5, ("spatial", "temporal")
CHAT, SHORT, LONG, CODE = "161/337", "128/32", "1024/256", "512/128"
"""Input and output tokens."""
Ask = tuple[str, str, float, str]
"""Model, lengths, requests/s, latency bound."""


@dataclass(frozen=True)
class Scenario:
    """Models on a cluster."""

    name: str
    cluster: str
    asked: tuple[Ask, ...]


MIXES: dict[str, tuple[Ask, ...]] = {
    "two alike": (("llama-3.1-8b", CHAT, 1.0, "20s"), ("llama-2-7b", CHAT, 1.0, "20s")),
    "one busy, one idle": (("llama-3.1-8b", CHAT, 8.0, "20s"), ("llama-2-13b", SHORT, 0.2, "10s")),
    "three sizes": (
        ("opt-1.3b", SHORT, 5.0, "5s"),
        ("llama-2-7b", CHAT, 1.0, "20s"),
        ("llama-2-13b", CODE, 0.5, "15s"),
    ),
    "many small": (
        ("opt-1.3b", SHORT, 4.0, "5s"),
        ("opt-2.7b", SHORT, 2.0, "5s"),
        ("llama-3.2-1b", CHAT, 2.0, "10s"),
        ("llama-3.2-3b", CODE, 1.0, "10s"),
        ("opt-1.3b", CODE, 1.0, "10s"),
    ),
    "tight and loose": (("llama-3.1-8b", SHORT, 4.0, "2s"), ("llama-3.1-8b", LONG, 0.5, "60s")),
}
CLUSTERS = {"few": "2xA100-80GB", "some": "4xA100-80GB", "eight": "8xA100-80GB", "older": "4xA40"}
SCENARIOS = tuple(
    Scenario(f"{mix}, {size}", cluster, asked) for size, cluster in CLUSTERS.items() for mix, asked in MIXES.items()
)


def demanded(scenario: Scenario, times: float) -> tuple[ModelDemand, ...]:
    """A scenario's models, at so many times its rates."""
    models = [
        {"name": f"{number}", "model": model, "workload": lengths, "rate": f"{rate * times}/s", "latency_bound": bound}
        for number, (model, lengths, rate, bound) in enumerate(scenario.asked)
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "models.yaml"
        file.write_text(json.dumps({"models": models}), encoding="utf-8")
        return read_demands(file, scenario.cluster)


def loaded(scenario: Scenario, frontiers: Frontiers) -> float:
    """By how much a scenario's rates are multiplied."""
    demands = demanded(scenario, 1.0)
    for method in YARDS:
        (proposal,) = propose(demands, demands[0].setting.cluster, (method,), frontiers)
        plan = proposal.plan or proposal.near
        if plan and plan.headroom:
            return float(f"{LOAD * plan.headroom:.3g}")
    raise ValueError(f"no method of {YARDS} has a plan for {scenario.name}")


def answered(scenario: Scenario, frontiers: Frontiers) -> dict[str, Any]:
    """Least headroom by method, 0 where a method has no plan; and what ours is like."""
    begin_s, times = time.perf_counter(), loaded(scenario, frontiers)
    demands = demanded(scenario, times)
    proposals = propose(demands, demands[0].setting.cluster, METHODS, frontiers)
    ours = next(proposal.plan for proposal in proposals if proposal.method == "exegpt")
    units = [(len(unit), len(unit[0].devices)) for unit in ours.units] if ours else []
    return {
        "scenario": scenario.name,
        "times": times,
        "headroom": {proposal.method: proposal.headroom or 0.0 for proposal in proposals},
        "units": units,
        "seconds": time.perf_counter() - begin_s,
    }


def ratio_of(answer: dict[str, Any]) -> float:
    """Ours over the best of the others; 2 where none of them has a plan."""
    found = dict(answer["headroom"])
    ours, best = found.pop("exegpt"), max(found.values())
    return float(ours / best) if best else 2.0 if ours else 1.0


def row(answer: dict[str, Any]) -> str:
    """A line of the table; units as models on devices."""
    units = ", ".join(f"{models} on {devices}" for models, devices in answer["units"])
    figures = "".join(f"{answer['headroom'].get(method, 0.0):10.2f}" for method in METHODS)
    return f"{answer['scenario']:28}{figures}{ratio_of(answer):8.2f}{answer['seconds']:7.0f} s  {units}"


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="scenarios whose names have this")
    parser.add_argument("--out", type=Path, help="JSONL of the answers")
    asked = parser.parse_args()
    before = asked.out.read_text(encoding="utf-8").splitlines() if asked.out and asked.out.exists() else []
    known = {answer["scenario"]: answer for answer in map(json.loads, before)}
    print(f"{'':28}" + "".join(f"{method:>10}" for method in METHODS) + "   ratio")
    ratios, frontiers = [], defaultdict[str, Frontiers](Frontiers)
    for scenario in SCENARIOS:
        if asked.only not in scenario.name:
            continue
        kind = scenario.cluster.split("x", 1)[1]
        answer = known.get(scenario.name) or answered(scenario, frontiers[kind])
        ratios.append(ratio_of(answer))
        print(row(answer), flush=True)
        if asked.out and scenario.name not in known:
            with asked.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(answer) + "\n")
    better = sum(ratio > BETTER for ratio in ratios)
    print(f"{len(ratios)} scenarios: at least {min(ratios):.2f} of the others' best, better in {better}")
    sys.exit(min(ratios) < LEAST or (not asked.only and better < OFTEN))


if __name__ == "__main__":
    main()
