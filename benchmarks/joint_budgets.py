"""Joint budgets beside the other methods: 20 scenarios of several models on one cluster.

For each, the factor by which all rates could rise until a model misses its bound, replayed, under every method. Exit
code 1 where ours is below 0.98 of the best of the others anywhere, or more than 1.02 times it in fewer than five.

    python -m benchmarks.joint_budgets
    python -m benchmarks.joint_budgets --only few
"""

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from exegpt.app.models_file import read_demands
from exegpt.app.planning import METHODS, propose

LEAST, BETTER, OFTEN = 0.98, 1.02, 5
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


def factors(scenario: Scenario) -> dict[str, float]:
    """Least headroom by method; 0 where a method has no plan."""
    models = [
        {"name": f"{number}", "model": model, "workload": lengths, "rate": f"{rate}/s", "latency_bound": bound}
        for number, (model, lengths, rate, bound) in enumerate(scenario.asked)
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "models.yaml"
        file.write_text(json.dumps({"models": models}), encoding="utf-8")
        demands = read_demands(file, scenario.cluster)
    proposals = propose(demands, demands[0].setting.cluster, METHODS)
    return {proposal.method: proposal.headroom or 0.0 for proposal in proposals}


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="scenarios whose names have this")
    asked = parser.parse_args()
    print(f"{'':28}" + "".join(f"{method:>10}" for method in METHODS) + "   over others")
    ratios = []
    for scenario in SCENARIOS:
        if asked.only not in scenario.name:
            continue
        found = factors(scenario)
        best = max(found[method] for method in METHODS if method != "exegpt")
        ratios.append(found["exegpt"] / best if best else 2.0)
        print(
            f"{scenario.name:28}" + "".join(f"{found[method]:10.2f}" for method in METHODS) + f"{ratios[-1]:14.2f}",
            flush=True,
        )
    better = sum(ratio > BETTER for ratio in ratios)
    print(f"{len(ratios)} scenarios: at least {min(ratios):.2f} of the others' best, better in {better}")
    sys.exit(min(ratios) < LEAST or (not asked.only and better < OFTEN))


if __name__ == "__main__":
    main()
