"""What a plan costs: 20 models, ten of them different, on 64 GPUs, from nothing.

Prints the seconds until the plan stands, frontiers included, and what it comes to. Exit code 1 over a minute.

    python -m benchmarks.plan
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from xmulti.plans.demands import read_demands
from xmulti.plans.planning import make_plan

CLUSTER = "8x8xA100-80GB"
MODELS = "llama-3.1-8b llama-2-7b llama-2-13b opt-13b llama-3-8b opt-6.7b qwen2.5-7b mistral-7b llama-3.2-3b".split()
MODELS += ["llama-3.1-70b"]
TASKS, RATES, BOUNDS = ("S", "C1", "T", "C2"), (2, 1, 4, 0.5, 3), (10, 20, 30)
MOST_S = 60.0


def models() -> list[dict[str, str]]:
    """Every model twice, with the same task, rate and bound."""
    return [
        {
            "name": f"{name}-{copy}",
            "model": name,
            "workload": TASKS[i % len(TASKS)],
            "rate": f"{RATES[i % len(RATES)]}/s",
            "latency_bound": f"{BOUNDS[i % len(BOUNDS)]}s",
        }
        for copy in (1, 2)
        for i, name in enumerate(MODELS)
    ]


def main() -> None:
    """Plan and print."""
    begin_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "models.yaml"
        file.write_text(json.dumps({"models": models()}), encoding="utf-8")
        demands = read_demands(file, CLUSTER)
    plan = make_plan(demands, demands[0].setting.cluster, "exegpt")
    seconds = time.perf_counter() - begin_s
    print(f"{len(plan.models)} models on {plan.cluster.devices} GPUs, {plan.free} of them free: {seconds:.0f} s")
    for model in plan.models:
        devices = len(model.devices)
        print(f"  {model.name:16} {devices:3} GPUs, {model.headroom:6.1f} times its rate, {model.schedule.policy}")
    sys.exit(seconds > MOST_S)


if __name__ == "__main__":
    main()
