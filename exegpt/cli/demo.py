"""`exegpt demo`: profile, tune, run and compare once, on this machine, without other files."""

from typing import TYPE_CHECKING

from exegpt.cli import INFEASIBLE
from exegpt.options.demo import DemoOptions
from exegpt.options.option_record import command
from xcore.frozen_heap import imports

if TYPE_CHECKING:
    from exegpt.api.demo import Demo
    from xcore.console.comparison import Comparison


@command
def demo(options: DemoOptions) -> int:
    """Create a small model, profile it, tune under a bound, run requests, and compare predicted with measured results.

    Example: exegpt demo
    """
    with imports():
        from exegpt.api import demo as app
    from exegpt.cli.answer import answer_document
    from xcore.console import output
    from xrunner.threads import set_threads
    from xscheduler.setting_search import infeasible_text

    set_threads(options.threads)
    prepared = app.prepare(options)
    plan, setting = prepared.plan, prepared.setting
    document = answer_document(plan.answer, setting, None, None)
    if plan.answer.schedule is None:
        if options.json:
            output.emit(document)
        output.note(infeasible_text(plan.answer, plan.bound_s))
        return INFEASIBLE
    output.note(f"3. Running {len(plan.requests)} requests under each of {len(plan.schedules)} schedules …")
    comparisons = app.run(prepared)
    if options.json:
        policies = [{"policy": c.schedule.policy, **c.document()} for c in comparisons]
        output.emit(document | {"policies": policies, "directory": str(options.directory)})
    else:
        _print(prepared, comparisons)
    return 0


def _print(prepared: "Demo", comparisons: "list[Comparison]") -> None:
    """Print one table, and the files that have the details."""
    from exegpt.report.comparison_text import miss_text, speed_text, summary_columns, summary_rows
    from xcore.console import output
    from xcore.console.schedule_text import bound_text, schedule_text

    schedule, processor = comparisons[0].schedule, prepared.setting.profile.provenance.get("processor")
    where = prepared.setting.profile.provenance.get("device", processor)
    title = f"{len(prepared.plan.requests):,} requests on {where}; latency bound: {bound_text(schedule)}"
    output.table(summary_columns(comparisons), summary_rows(comparisons), title)
    print(f"The schedule that is predicted to be the best: {schedule_text(schedule)}.")
    if text := miss_text(comparisons[0]):
        print(text)
    changed = max((run.slowdown for run in comparisons), key=lambda slowdown: slowdown.change)
    if text := speed_text(changed):
        output.note(f"· {text}")
    print(
        f"Written to {prepared.directory}/: report.html (all figures; open it in a browser), schedule.json, trace.json "
        "(for ui.perfetto.dev)."
    )
