"""The HTML reports of `exegpt plan`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exegpt.app.multimodel.planning import Proposal
    from exegpt.app.multimodel.stage_planning import StageProposal
    from exegpt.price import Prices


def write_plan_report(
    path: Path,
    proposals: "list[Proposal]",
    advice: Sequence[str],
    prices: "Prices | None",
    assumptions: Sequence[str],
) -> None:
    """Write the budgets with a chart, a table of the methods, and the advice."""
    from exegpt import document
    from exegpt.cli.plan_tables import methods_table, plan_table, why_best
    from exegpt.report import gantt
    from exegpt.report.sections import Section, page

    best, sections = proposals[0], []
    refused = [f"{proposal.method}: {proposal.why_not}" for proposal in proposals if proposal.plan is None]
    notes = tuple(f"{text}." for text in advice)
    if best.plan:
        columns, rows, title = plan_table(best.plan)
        drawing = gantt.drawing(gantt.of_plan(best.plan))
        sections.append(Section(title, tuple(columns), tuple(map(tuple, rows)), notes, drawing))
    columns, rows = methods_table(proposals, prices)
    if rows:
        why = [f"{text}." for text in [why_best(proposals)] if text]
        title = "Methods" if len(proposals) > 1 else "All models together"
        sections.append(Section(title, tuple(columns), tuple(map(tuple, rows)), (*why, *refused)))
    facts = [*assumptions, *([] if sections else [*refused, *notes])]
    document.write_text(path, page("Several models on one cluster", facts, sections))


def write_stages_report(path: Path, proposals: "list[StageProposal]", assumptions: Sequence[str]) -> None:
    """Write the stages with a chart, and the heuristics' times."""
    from exegpt import document
    from exegpt.cli.plan_tables import STAGE_COLUMNS, others_text, stages_rows, stages_title
    from exegpt.report import gantt
    from exegpt.report.sections import Section, page

    plan = proposals[0].plan
    drawing = gantt.drawing(gantt.of_stages(plan))
    section = Section(stages_title(plan), STAGE_COLUMNS, stages_rows(plan), others_text(proposals), drawing)
    document.write_text(path, page("An application in stages", list(assumptions), [section]))
