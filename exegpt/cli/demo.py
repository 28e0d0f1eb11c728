"""`exegpt demo`: profile, tune, run and compare once, on this machine, without other files."""

from pathlib import Path
from typing import TYPE_CHECKING

from exegpt.cli import INFEASIBLE
from exegpt.options.demo import DemoOptions
from exegpt.options.option_record import command

if TYPE_CHECKING:
    from exegpt.api.demo import Demo
    from xcore.console.comparison import Comparison


@command
def demo(options: DemoOptions) -> int:
    """Create a small model, profile it, tune under a bound, run requests, and compare predicted with measured results.

    Example: exegpt demo
    """
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
    if not options.json:
        _print_search(prepared)
    output.note(f"3. Running {len(plan.requests)} requests under each of {len(plan.schedules)} schedules …")
    comparisons = app.run(prepared)
    if options.json:
        policies = [{"policy": c.schedule.policy, **c.document()} for c in comparisons]
        output.emit(document | {"policies": policies, "directory": str(options.directory)})
    else:
        _print_runs(comparisons, options.directory)
    return 0


def _print_search(prepared: "Demo") -> None:
    from exegpt.cli.answer import POLICY_COLUMNS, policy_rows, print_plot, print_search
    from xcore.console import output
    from xcore.duration import format_duration

    plan = prepared.plan
    title = f"The best schedule of each policy under {format_duration(plan.bound_s)}, workload "
    output.table(POLICY_COLUMNS, policy_rows(plan.answer, prepared.setting), title + prepared.setting.workload.name)
    print_plot(prepared.answers, plan.bound_s)
    print_search(plan.answer)
    if (first := plan.best_steady) and first != plan.answer.schedule:
        output.note(
            f"· {first.policy} has the best steady state; but these {len(plan.requests)} requests all arrive at the "
            f"start, and in their replay {plan.schedules[0].policy} finishes first within the bound"
        )


def _print_runs(comparisons: "list[Comparison]", directory: Path) -> None:
    from exegpt.report.comparison_text import COMPARISON_COLUMNS, bound_text, comparison_rows, speed_text
    from xcore.console import output

    output.table(COMPARISON_COLUMNS, comparison_rows(comparisons), "Predicted and measured results of these requests")
    if text := bound_text(comparisons[0], "steady state and the replay of these requests"):
        print(text)
    if text := speed_text(comparisons[0].slowdown):
        output.note(f"· {text}")
    print(
        f"Written to {directory}/: report.html (open it in a browser), schedule.json, trace.json (for ui.perfetto.dev)."
    )
