"""`exegpt run`: run requests offline and measure."""

from pathlib import Path
from typing import TYPE_CHECKING

from exegpt.options.option_record import command, option_name
from exegpt.options.run import RunOptions
from xcore.errors import Infeasible, InputError
from xcore.frozen_heap import imports

if TYPE_CHECKING:
    from collections.abc import Mapping

    from exegpt.api.offline_run import OfflineRun, RunPlan
    from xcore.console.comparison import Comparison


@command
def run(options: RunOptions) -> None:
    """Run requests offline, measure, and compare with the prediction. Without a schedule, search for one first.

    A machine without a profile is first measured at a few points, which takes seconds. A schedule of several devices
    needs a rank for each device. Without a schedule, ranks measure their own profile, and search for a schedule for all
    of them.

    Example: exegpt run --model my-model --requests requests.jsonl --out results.jsonl

    Example: mpirun -n 4 exegpt run --model my-model --schedule schedule.json --requests requests.jsonl

    Example: exegpt run --plan plan.json --requests requests.jsonl

    Example: exegpt run --plan plan.json --requests requests.jsonl --order learned --ranker chat=chat.npz --ranker
    code=code.npz
    """
    if options.plan is not None:
        from exegpt.cli.run_plan import run_plan

        return run_plan(options, options.plan)
    with imports():
        from exegpt.api import offline_run
        from xrunner.comm.ranks import job

    with job() as ranks:
        ranks.attempt(lambda: _check(options))
        result = offline_run.run(options, ranks)
    _answer(result, options, ranks.rank)


def _check(options: RunOptions) -> None:
    """Raise InputError for options that exclude each other, before anything is measured."""
    from xscheduler.policy_names import policy_names
    from xscheduler.search_problem import with_variables

    bound, fixed = options.latency_bound_s, options.fixed
    if options.application is not None or options.in_turn:
        raise InputError("--application and --in-turn need the models of a plan: pass --plan, or leave them out.")
    if options.resume and options.out is None:
        raise InputError("--resume needs --out: it continues that file.")
    if options.no_profile and options.profile is not None:
        raise InputError(f"--no-profile cannot be combined with --profile '{options.profile}': leave one of them out.")
    if options.adapt and not options.order_choice.plain:
        others = " and ".join(options.order_choice.options)
        raise InputError(f"--adapt works only with the default order: leave out --adapt, or {others}.")
    if options.schedule:
        searched = {"policy": options.policy, "latency_bound": bound and options.latency_bound, **fixed}
        _check_unsearched(options.schedule, searched)
    with_variables(policy_names(options.policy), fixed)


def _check_unsearched(schedule: Path, searched: "Mapping[str, object]") -> None:
    """Raise InputError for options that only a search uses, together with a given schedule."""
    for name, value in searched.items():
        if value is not None:
            option = option_name(name)
            raise InputError(
                f"The schedule '{schedule}' determines {option}: leave {option} {value} or --schedule out."
            )


def _answer(result: "OfflineRun", options: RunOptions, rank: int) -> None:
    """Write the report, and print; raise Infeasible if there is no schedule."""
    from exegpt.api.reports import write_run_report
    from xcore.console import output
    from xcore.document import to_dict
    from xscheduler.shortlist import checked_by

    setting, schedule, comparison = result.plan.setting, result.plan.schedule, result.comparison
    closing: dict[str, object] = {
        "assumptions": list(setting.assumptions),
        "provenance": output.provenance(setting.profile, options.seed, attention=result.inputs.described),
    }
    if schedule is None:
        return _refuse(result.plan, rank, closing if options.json else None)
    if comparison is None:
        return
    if options.report:
        write_run_report(options.report, f"{setting.model.name}: an offline run", setting, [comparison])
    if options.json:
        return output.emit(comparison.document() | {"schedule": to_dict(schedule), **closing})
    output.notes(setting.assumptions)
    checked = "steady state" if options.schedule else checked_by(setting.workload.requests or ())
    _print(comparison, checked, options.order_choice.preempt != "none")


def _refuse(plan: "RunPlan", rank: int, closing: "dict[str, object] | None") -> None:
    """Raise Infeasible, and print its document if the user wants JSON.

    Other ranks end with the same code and print nothing.
    """
    from exegpt.cli import INFEASIBLE
    from xcore.console import output

    if rank:
        raise SystemExit(INFEASIBLE)
    if closing:
        lowest = {"schedule": None, "lowest_latency_s": plan.lowest_latency_s, "reason": plan.reason}
        output.emit(lowest | closing)
    raise Infeasible(plan.reason or "", plan.lowest_latency_s)


def _print(comparison: "Comparison", checked: str, preempts: bool) -> None:
    from exegpt.report.comparison_text import bound_text, speed_text, summary_columns, summary_rows
    from xcore.console import output
    from xcore.console.schedule_text import schedule_text
    from xcore.quantity import counted

    output.table(summary_columns([comparison]), summary_rows([comparison]), schedule_text(comparison.schedule))
    if preempts or comparison.schedule.admission == "grow":
        often = counted(comparison.preemptions, "preemption")
        output.note(f"· {often}, {comparison.predicted_preemptions:,} predicted")
    if comparison.schedule.prefix_caching:
        output.note(f"· {comparison.reused:,} tokens reused from the cache, {comparison.predicted_reused:,} predicted")
    for change in comparison.changes:
        paused = f"{'layers moved' if change.moved else 'a new cache'}, a pause of {output.seconds(change.pause_s)}"
        how = paused if change.pause_s else "without a pause"
        if change.refused:
            how += f"; the run kept its schedule: {change.refused}"
        print(f"At {output.seconds(change.changed_s)}, for new lengths: {schedule_text(change.schedule)}; {how}.")
    seconds = output.seconds(comparison.seconds)
    counts = f"{counted(len(comparison.results), 'request')}, {counted(comparison.tokens, 'output token')}"
    print(f"{counts} in {seconds}.")
    if failed := [result for result in comparison.results if result.error]:
        print(f"{len(failed):,} of them failed; the first is '{failed[0].id}': {failed[0].error}.")
    if text := bound_text(comparison, checked):
        print(text)
    if text := speed_text(comparison.slowdown):
        output.note(f"· {text}")
