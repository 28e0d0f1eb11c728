"""An application of three models in stages on two cores: SamuLLM's plan, beside those of the Max- and Min-heuristic,
each run and predicted.

Documents are summarised chunk by chunk, each chunk with the summary so far; another model judges the final summaries,
and a third one answers prompts of its own. Each model is a random Llama in float32; a device is one core. Engines are
started and stopped as `exegpt run --plan` does it. First runs measure how long a start takes; all plans know that.

    python -m benchmarks.stages
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.application import print_medians, run_options
from benchmarks.model_sizes import ModelSizes
from exegpt.reproduction.samullm_applications import chunks
from xcore import document
from xcore.specs.cluster import local_cluster
from xmulti.files.application_file import read_application
from xmulti.files.stage_plan import StagePlan
from xmulti.stages.stage_planning import propose_stages
from xmulti.stages.stage_run import StageRun, run_stages
from xprofiler.profiles import measured_profile
from xrunner.comm.ranks import Ranks
from xrunner.models.device import CPU

SIZES = {
    "summary": ModelSizes(layers=4, hidden=512, heads=8, kv_heads=8, ffn=1376, vocab=8000, context=768),
    "judge": ModelSizes(layers=8, hidden=512, heads=8, kv_heads=4, ffn=1376, vocab=8000, context=768),
    "answers": ModelSizes(layers=8, hidden=384, heads=6, kv_heads=6, ffn=1024, vocab=8000, context=768),
}


def application(directories: Mapping[str, Path], documents: int, load_s: float) -> dict[str, object]:
    """The application file's content."""
    load = f"{load_s:.3g}s"
    nodes: list[dict[str, object]] = [
        {"name": "summary", "workload": "128/48", "requests": documents, "rounds": chunks(documents)},
        {"name": "judge", "workload": "32/64", "times": 4},
        {"name": "answers", "workload": "96/96", "requests": 8 * documents},
    ]
    edges = [{"source": "summary", "target": "summary"}, {"source": "summary", "target": "judge", "kind": "final"}]
    for node in nodes:
        node |= {"model": str(directories[str(node["name"])]), "load": load}
    return {"nodes": nodes, "edges": edges}


def plans_of(folder: Path, asked: dict[str, object]) -> dict[str, StagePlan]:
    """SamuLLM's plan, and the heuristics', by their names."""
    cluster = document.to_dict(local_cluster()) | {"devices_per_node": 2}
    del cluster["name"]  # the file's
    (folder / "local-2.yaml").write_text(json.dumps(cluster), encoding="utf-8")
    (folder / "application.yaml").write_text(json.dumps(asked), encoding="utf-8")
    read = read_application(folder / "application.yaml", str(folder / "local-2.yaml"))
    return {proposal.method: proposal.plan for proposal in propose_stages(read)}


def run(folder: Path, plan: StagePlan) -> StageRun:
    """Run a plan on the application that lies beside it."""
    document.write(folder / "stages.json", plan)
    return run_stages(run_options(folder / "stages.json", folder / "application.yaml"))


def load_s(ran: StageRun) -> float:
    """The median start of an engine."""
    return statistics.median(loading.end_s - loading.start_s for loading in ran.loadings)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--documents", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3, help="repetitions, in turns; the median counts")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    seconds: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        os.environ["EXEGPT_CACHE"] = name  # measured now: a profile of a busy machine may lie in the usual one
        folder = Path(name)
        directories = {model: folder / model for model in SIZES}
        for number, (model, sizes) in enumerate(SIZES.items()):
            sizes.create(directories[model], seed=number)
            measured_profile(directories[model], "fp32", Ranks(), CPU, "triton")
        for plan in plans_of(folder, application(directories, 4, 5.0)).values():  # engines of two ranks measure, too
            run(folder, plan)
        start_s = load_s(run(folder, plan))
        plans = plans_of(folder, application(directories, asked.documents, start_s))
        print(f"an engine starts in {start_s:.1f} s; {len(chunks(asked.documents))} documents", flush=True)
        for number in range(asked.rounds):
            for method, plan in plans.items():
                ran = run(folder, plan)
                expected = ran.predicted.seconds if ran.predicted else float("nan")
                seconds.setdefault(method, []).append((ran.seconds, expected))
                stops = sum(ran.stops(model) for model in SIZES)
                print(
                    f"round {number + 1}, {method}: {ran.seconds:.1f} s, predicted {expected:.1f} s "
                    f"({expected / ran.seconds - 1:+.1%}), planned {plan.seconds:.1f} s; {len(ran.stages)} stages, "
                    f"{len(ran.loadings)} starts of {load_s(ran):.1f} s, {stops} stops",
                    flush=True,
                )
    print_medians(seconds, "samullm")


if __name__ == "__main__":
    main()
