"""A chain summary by two models on two cores: as soon as its calls can begin, one model after the other, and each model
alone on both cores; measured and predicted.

Documents of three chunks in the median (`exegpt reproduce samullm` has the same distribution) are summarised chunk by
chunk, each with the summary so far; the final summaries are judged. Each model is a random Llama in float32 with a
device of its own, which is one core; alone it has two replicas. All of it is what `exegpt run --plan` does.

    python -m benchmarks.application
"""

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.model_sizes import ModelSizes
from benchmarks.servers import orca
from exegpt.reproduction.samullm_applications import chunks
from xcore import document
from xcore.specs.cluster_plan import Plan, PlannedModel
from xcore.specs.request_times import summarise
from xmulti.plans.plan_run import PlanRun, PlanRunOptions, run_plan

SIZES = {
    "summary": ModelSizes(layers=4, hidden=512, heads=8, kv_heads=8, ffn=1376, vocab=8000, context=768),
    "judge": ModelSizes(layers=8, hidden=512, heads=8, kv_heads=4, ffn=1376, vocab=8000, context=768),
}
CHUNK, SUMMARY, VERDICT = 128, 48, 64
"""Tokens of a chunk, at most of a summary, and of a verdict."""
SEED = 0


def plan_of(directories: Mapping[str, Path], replicas: int) -> Plan:
    """Each model on as many devices as it has replicas."""
    models, first = [], 0
    for name, directory in directories.items():
        schedule = replace(orca(directory, 24), admission="grow", replicas=replicas)
        devices = tuple(range(first, first + replicas))
        cluster = replace(schedule.cluster, devices_per_node=replicas)
        unknown = summarise((), 0.0)
        schedule = replace(schedule, cluster=cluster)
        models.append(PlannedModel(name, devices, schedule, unknown, requests=1, directory=str(directory)))
        first += replicas
    return Plan(Plan.VERSION, "by hand", replace(cluster, devices_per_node=first), tuple(models))


def application(rounds: Sequence[int], times: int) -> dict[str, Any]:
    """Both nodes, texts made up; a verdict reads instructions and a final summary, each so many times."""
    summary = {
        "name": "summary",
        "workload": f"{CHUNK}/{SUMMARY}",
        "requests": len(rounds),
        "rounds": rounds,
        "model": "any",
    }
    judge = {"name": "judge", "model": "any", "workload": f"32/{VERDICT}", "times": times}
    edges = [{"source": "summary", "target": "summary"}, {"source": "summary", "target": "judge", "kind": "final"}]
    return {"nodes": [summary, judge], "edges": edges}


def alone(name: str, rounds: Sequence[int], times: int) -> dict[str, Any]:
    """One node's calls, with prompts as long as they are in the application."""
    node = application(rounds, times)["nodes"][name == "judge"]
    if name == "summary":
        return {"nodes": [node], "edges": [{"source": name, "target": name}]}
    return {"nodes": [node | {"workload": f"{32 + SUMMARY}/{VERDICT}", "requests": len(rounds)}]}


def run(folder: Path, plan: Plan, asked: dict[str, Any], in_turn: bool = False) -> PlanRun:
    """Run an application on a plan's engines."""
    document.write(folder / "plan.json", plan)
    (folder / "application.yaml").write_text(json.dumps(asked), encoding="utf-8")
    return run_plan(replace(run_options(folder / "plan.json", folder / "application.yaml"), in_turn=in_turn))


def run_options(plan: Path, application: Path) -> PlanRunOptions:
    """An application on one thread for each rank."""
    return PlanRunOptions(
        plan=plan,
        directories={},
        requests=None,
        application=application,
        out=None,
        resume=False,
        seed=SEED,
        device=None,
        attention=None,
        threads=1,
    )


def print_medians(seconds: Mapping[str, Sequence[tuple[float, float]]], first: str) -> None:
    """Print each way's median run, and how much longer it is than that of the `first`, measured and predicted."""
    middle = {way: sorted(pairs)[len(pairs) // 2] for way, pairs in seconds.items()}
    for way, (real, _) in middle.items():
        gains = [other / own for other, own in zip(middle[way], middle[first], strict=True)]
        print(f"{way}: {real:.1f} s; {gains[0]:.3f} times as long as {first}, predicted {gains[1]:.3f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--documents", type=int, default=48)
    parser.add_argument("--times", type=int, default=4, help="verdicts of each summary; SamuLLM has 1 and 4")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions, in turns; the median counts")
    asked = parser.parse_args()
    rounds = chunks(asked.documents)
    print(f"{asked.documents} documents of {sum(rounds)} chunks, the longest of {max(rounds)}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        os.environ["EXEGPT_CACHE"] = name  # measured now: a profile of a busy machine may lie in the usual one
        folder = Path(name)
        directories = {model: folder / model for model in SIZES}
        for number, (model, sizes) in enumerate(SIZES.items()):
            sizes.create(directories[model], seed=number)
        both = plan_of(directories, 1)
        seconds: dict[str, list[tuple[float, float]]] = {"together": [], "in turn": [], "alone on both": []}
        for number in range(asked.rounds):
            runs = {"together": [run(folder, both, application(rounds, asked.times))]}
            runs["in turn"] = [run(folder, both, application(rounds, asked.times), in_turn=True)]
            runs["alone on both"] = [
                run(folder, plan_of({model: directory}, 2), alone(model, rounds, asked.times))
                for model, directory in directories.items()
            ]
            for way, found in runs.items():
                real, expected = sum(r.seconds for r in found), sum(r.predicted_seconds or 0.0 for r in found)
                seconds[way].append((real, expected))
                off = f"{expected / real - 1:+.1%}"
                print(f"round {number + 1}, {way}: {real:.1f} s, predicted {expected:.1f} s ({off})", flush=True)
    print_medians(seconds, "together")


if __name__ == "__main__":
    main()
