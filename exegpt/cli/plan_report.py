"""The HTML reports of `exegpt plan`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exegpt.report.sections import Section
    from xcore.specs.cluster_plan import Plan
    from xcore.specs.price import Prices
    from xmulti.files.stage_plan import StagePlan
    from xmulti.plans.planning import Proposal
    from xmulti.stages.stage_planning import StageProposal


def write_plan_report(
    path: Path,
    proposals: "list[Proposal]",
    advice: Sequence[str],
    prices: "Prices | None",
    assumptions: Sequence[str],
) -> None:
    """Write the budgets with a chart, a table of the methods, and the advice."""
    from exegpt.cli.plan_tables import methods_table, why_best
    from exegpt.report.sections import Section, page
    from xcore import document

    best, sections = proposals[0].found, []
    refused = [f"{proposal.method}: {proposal.why_not}" for proposal in proposals if proposal.found is None]
    notes = tuple(f"{text}." for text in advice)
    if best:
        sections.append(_drawn(best, notes))
    columns, rows = methods_table(proposals, prices)
    if rows:
        why = [f"{text}." for text in [why_best(proposals)] if text]
        title = "Methods" if len(proposals) > 1 else "All models together"
        sections.append(Section(title, tuple(columns), tuple(map(tuple, rows)), (*why, *refused)))
    facts = [*assumptions, *([] if sections else [*refused, *notes])]
    document.write_text(path, page("Several models on one cluster", facts, sections))


def write_stages_report(path: Path, proposals: "list[StageProposal]", assumptions: Sequence[str]) -> None:
    """Write the stages with a chart, and the heuristics' times."""
    from exegpt.cli.plan_tables import others_text
    from exegpt.report.sections import page
    from xcore import document

    section = _drawn(proposals[0].plan, others_text(proposals))
    document.write_text(path, page("An application in stages", list(assumptions), [section]))


def _drawn(plan: "Plan | StagePlan", notes: tuple[str, ...]) -> "Section":
    """Return a plan's table with its chart."""
    from exegpt.cli.plan_tables import picture, plan_table
    from exegpt.report import gantt
    from exegpt.report.sections import Section

    columns, rows, title = plan_table(plan)
    return Section(title, tuple(columns), tuple(map(tuple, rows)), notes, gantt.drawing(picture(plan)))
