"""`exegpt plan --method samullm`: an application's models in stages."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from exegpt.quantity import counted

if TYPE_CHECKING:
    from exegpt.app.multimodel.stage_planning import StageProposal
    from exegpt.stage_plan import StagedNode, StagePlan

COLUMNS = ("from", "to", "models")


def plan_stages(
    file: Path, cluster: str, how: dict[str, Any], out: Path | None, report: Path | None, json: bool
) -> int:
    """Plan an application file, print its stages beside the heuristics' times, and write plan and report; exit code 0.

    `how`: what `find_setting` takes.
    """
    from exegpt import document
    from exegpt.app.multimodel.application_file import read_application
    from exegpt.app.multimodel.stage_planning import propose_stages
    from exegpt.cli.plan_report import write_stages_report
    from exegpt.report import output

    asked = read_application(file, cluster, **how)
    proposals = propose_stages(asked)
    best = proposals[0]
    if out:
        document.write(out, best.plan)
    if report:
        write_stages_report(report, proposals, asked.assumptions)
    if json:
        methods = [{"method": p.method, "seconds": p.plan.seconds, "search_s": p.plan.search_s} for p in proposals]
        facts = {"plan": document.to_dict(best.plan), "methods": methods, "assumptions": list(asked.assumptions)}
        output.emit({**facts, "provenance": output.provenance(seed=0)})
        return 0
    output.notes(asked.assumptions)
    print_stages(best.plan)
    for text in others_text(proposals):
        output.note(text)
    if out:
        print(f"Plan written to {out}.")
    return 0


def others_text(proposals: "list[StageProposal]") -> tuple[str, ...]:
    """What the heuristics come to."""
    from exegpt.duration import duration_text

    return tuple(f"{other.method}-heuristic: {duration_text(other.plan.seconds)}." for other in proposals[1:])


def print_stages(plan: "StagePlan") -> None:
    """Each stage with its models, and a picture of the devices."""
    from exegpt.report import gantt, output

    output.table(COLUMNS, stages_rows(plan), stages_title(plan))
    print(gantt.text(gantt.of_stages(plan)))


def stages_rows(plan: "StagePlan") -> tuple[tuple[str, ...], ...]:
    """A row for each stage."""
    from exegpt.duration import duration_text

    return tuple(
        (duration_text(stage.start_s), duration_text(stage.end_s), ", ".join(_node_text(node) for node in stage.nodes))
        for stage in plan.stages
    )


def stages_title(plan: "StagePlan") -> str:
    """How many stages on how many devices."""
    return f"{plan.method}: {counted(len(plan.stages), 'stage')} on {counted(plan.devices, 'device')}"


def _node_text(node: "StagedNode") -> str:
    """A node with its GPUs: `chat 0–3 (2×TP2)`."""
    from exegpt.cli.plan import ranges

    return f"{node.name} {ranges(tuple(sorted(node.devices)))} ({node.dp}×TP{node.tp})"
