"""`exegpt plan --method samullm`: an application's models in stages."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exegpt.stage_plan import StagedNode, StagePlan


def plan_stages(file: Path, cluster: str, how: dict[str, Any], out: Path | None, json: bool) -> int:
    """Plan an application file, print its stages beside the heuristics' times, and write the plan; exit code 0.

    `how`: what `find_setting` takes.
    """
    from exegpt import document
    from exegpt.app.application_file import read_application
    from exegpt.app.stage_planning import propose_stages
    from exegpt.duration import duration_text
    from exegpt.report import output

    asked = read_application(file, cluster, **how)
    best, *others = propose_stages(asked)
    if out:
        document.write(out, best.plan)
    if json:
        methods = [
            {"method": p.method, "seconds": p.plan.seconds, "search_s": p.plan.search_s} for p in (best, *others)
        ]
        facts = {"plan": document.to_dict(best.plan), "methods": methods, "assumptions": list(asked.assumptions)}
        output.emit({**facts, "provenance": output.provenance(seed=0)})
        return 0
    output.notes(asked.assumptions)
    print_stages(best.plan)
    for other in others:
        output.note(f"{other.method}-heuristic: {duration_text(other.plan.seconds)}.")
    if out:
        print(f"Plan written to {out}.")
    return 0


def print_stages(plan: "StagePlan") -> None:
    """Each stage with its models."""
    from exegpt.duration import duration_text
    from exegpt.report import output

    rows = [
        (duration_text(stage.start_s), duration_text(stage.end_s), ", ".join(_node_text(node) for node in stage.nodes))
        for stage in plan.stages
    ]
    stages = f"{len(rows)} stages" if len(rows) > 1 else "1 stage"
    output.table(("from", "to", "models"), rows, f"{plan.method}: {stages} on {plan.devices} devices")


def _node_text(node: "StagedNode") -> str:
    """A node with its GPUs: `chat 0–3 (2×TP2)`."""
    from exegpt.cli.plan import ranges

    return f"{node.name} {ranges(tuple(sorted(node.devices)))} ({node.dp}×TP{node.tp})"
