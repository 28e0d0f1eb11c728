"""`exegpt run`: run requests offline and measure."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exegpt.cli import options
from xcore.errors import Infeasible, InputError

if TYPE_CHECKING:
    from exegpt.api.offline_run import OfflineRun, RunOptions, RunPlan
    from xcore.console.comparison import Comparison


def run(
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", help="A model directory in the Hugging Face layout; with --plan NAME=DIR."),
    ] = None,
    requests: Annotated[
        str | None, typer.Option("--requests", "-r", help="A JSONL or trace file, or - for standard input.")
    ] = None,
    schedule: options.SCHEDULE = None,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="Run several models by this plan of `exegpt plan`; requests name their `model`."),
    ] = None,
    application: Annotated[
        Path | None,
        typer.Option("--application", help="With --plan: a YAML file of calls that read each other's outputs."),
    ] = None,
    in_turn: Annotated[
        bool, typer.Option("--in-turn", help="With --application: one model after the other, for comparison.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write one JSON line per result.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    skip_invalid: Annotated[
        bool, typer.Option("--skip-invalid", help="Give invalid requests an error instead of refusing the list.")
    ] = False,
    latency_bound: Annotated[str, typer.Option("--latency-bound", "-l", help=options.LATENCY_BOUND_HELP)] = "inf",
    profile: options.PROFILE = None,
    no_profile: Annotated[
        bool,
        typer.Option(
            "--no-profile",
            help="If this machine has no profile, use its roofline instead of first measuring a few points.",
        ),
    ] = False,
    policy: options.POLICY = None,
    encode_batch: options.ENCODE_BATCH = None,
    decode_iterations: options.DECODE_ITERATIONS = None,
    micro_batches: options.MICRO_BATCHES = None,
    tp_degree: options.TP_DEGREE = None,
    tp_gpus: options.TP_GPUS = None,
    max_num_seqs: options.MAX_NUM_SEQS = None,
    max_num_batched_tokens: options.MAX_NUM_BATCHED_TOKENS = None,
    admission: options.ADMISSION = None,
    prefix_caching: options.PREFIX_CACHING = False,
    kv_blocks: Annotated[
        int | None, typer.Option(min=1, help="KV blocks on each stage, instead of the schedule's.")
    ] = None,
    adjust: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="RRA, WAA: pick prompts so that a batch's tokens stay within this share of the mean."
        ),
    ] = None,
    adapt: Annotated[
        bool, typer.Option("--adapt", help="When lengths drift, search again and change the schedule during the run.")
    ] = False,
    order: options.ORDER = None,
    starvation_guard: options.STARVATION_GUARD = False,
    ranker: options.RANKER = None,
    columns: options.COLUMNS = None,
    scale_to_context: options.SCALE_TO_CONTEXT = False,
    seed: options.SEED = 0,
    device: options.DEVICE = None,
    attention: options.ATTENTION = None,
    dtype: options.RUN_DTYPE = None,
    threads: options.THREADS = None,
    report: options.REPORT = None,
    plugin: options.PLUGIN = None,
    json: options.JSON = False,
) -> None:
    """Run requests offline, measure, and compare with the prediction. Without a schedule, search for one first.

    A machine without a profile is first measured at a few points, which takes seconds. A schedule of several devices
    needs a rank for each. Ranks without a schedule measure themselves and search for one for as many devices.

    Example: exegpt run --model my-model --requests requests.jsonl --out results.jsonl

    Example: mpirun -n 4 exegpt run --model my-model --schedule schedule.json --requests requests.jsonl

    Example: exegpt run --plan plan.json --requests requests.jsonl
    """
    typed = dict(locals())
    if plan is not None:
        from exegpt.cli.run_plan import run_plan

        return run_plan(typed)
    from exegpt.api import offline_run
    from xrunner.comm.ranks import job

    with job() as ranks:
        run_options = ranks.attempt(lambda: _read_options(typed))
        result = offline_run.run(run_options, ranks)
    _answer(result, run_options, ranks.rank, json)


def _read_options(typed: "dict[str, Any]") -> "RunOptions":
    """Return the options object of the command's parameters; InputError for those that exclude each other."""
    from exegpt.api.offline_run import RunOptions
    from xcore.duration import parse_duration
    from xscheduler.ordering import OrderChoice
    from xscheduler.policy_names import policy_names
    from xscheduler.search_problem import with_variables

    schedule, bound, policy = typed["schedule"], typed["latency_bound"], typed["policy"]
    if typed["application"] is not None or typed["in_turn"]:
        raise InputError("--application and --in-turn need the models of a plan: pass --plan, or leave them out.")
    if typed["requests"] is None:
        raise InputError("A run needs requests: pass --requests FILE.")
    if typed["resume"] and typed["out"] is None:
        raise InputError("--resume needs --out: it continues that file.")
    if typed["no_profile"] and typed["profile"] is not None:
        raise InputError(
            f"--no-profile skips a first measurement, which --profile '{typed['profile']}' doesn't need: leave one of "
            "them out."
        )
    choice = OrderChoice.of(typed["order"], typed["starvation_guard"], typed["ranker"])
    if typed["adapt"] and not choice.plain:
        raise InputError("--adapt searches schedules for first come, first served: leave --adapt or --order out.")
    fixed = options.fixed(typed)
    if schedule:
        _check_unsearched(schedule, {"policy": policy, "latency_bound": None if bound == "inf" else bound, **fixed})
    with_variables(policy_names(policy), fixed)  # before anything is measured
    read = {
        "model": options.only_model(typed["model"], "run"),
        "order": choice,
        "fixed": fixed,
        "latency_bound_s": parse_duration(bound),
        "policies": policy_names(policy) if policy else None,
    }
    return options.build(RunOptions, typed | read)


def _check_unsearched(schedule: Path, searched: "dict[str, object]") -> None:
    """Raise InputError for options that only a search uses, together with a given schedule."""
    for name, value in searched.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise InputError(
                f"The schedule '{schedule}' is run as it stands: leave {option} {value} or --schedule out."
            )


def _answer(result: "OfflineRun", run_options: "RunOptions", rank: int, json: bool) -> None:
    """Write the report, and print; raise Infeasible if there is no schedule."""
    from exegpt.api.reports import write_run_report
    from xcore.console import output
    from xcore.document import to_dict
    from xscheduler.shortlist import checked_by

    setting, schedule, comparison = result.plan.setting, result.plan.schedule, result.comparison
    closing = {
        "assumptions": list(setting.assumptions),
        "provenance": output.provenance(setting.profile, run_options.seed, attention=result.inputs.described),
    }
    if schedule is None:
        return _refuse(result.plan, rank, closing if json else None)
    if comparison is None:
        return
    if run_options.report:
        write_run_report(run_options.report, f"{setting.model.name}: an offline run", setting, [comparison])
    if json:
        return output.emit(comparison.document() | {"schedule": to_dict(schedule), **closing})
    output.notes(setting.assumptions)
    _print(comparison, "steady state" if run_options.schedule else checked_by(setting.workload.requests or ()))


def _refuse(plan: "RunPlan", rank: int, closing: "dict[str, Any] | None") -> None:
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


def _print(comparison: "Comparison", checked: str) -> None:
    from exegpt.report.comparison_text import COMPARISON_COLUMNS, bound_text, comparison_rows, speed_text
    from xcore.console import output
    from xcore.console.schedule_text import schedule_text

    output.table(COMPARISON_COLUMNS, comparison_rows([comparison]), schedule_text(comparison.schedule))
    if comparison.schedule.admission == "grow":
        output.note(f"· {comparison.preemptions:,} preemptions, {comparison.predicted_preemptions:,} predicted")
    if comparison.schedule.prefix_caching:
        output.note(f"· {comparison.reused:,} tokens reused from the cache, {comparison.predicted_reused:,} predicted")
    for change in comparison.changes:
        paused = f"{'layers moved' if change.moved else 'a new cache'}, a pause of {output.seconds(change.pause_s)}"
        how = paused if change.pause_s else "without a pause"
        if change.refused:
            how += f"; the run kept its schedule: {change.refused}"
        print(f"At {output.seconds(change.changed_s)}, for new lengths: {schedule_text(change.schedule)}; {how}.")
    seconds = output.seconds(comparison.seconds)
    print(f"{len(comparison.results):,} requests, {comparison.tokens:,} output tokens in {seconds}.")
    if failed := [result for result in comparison.results if result.error]:
        print(f"{len(failed):,} of them failed; the first, '{failed[0].id}': {failed[0].error}.")
    if text := bound_text(comparison, checked):
        print(text)
    if text := speed_text(comparison.slowdown):
        output.note(f"· {text}")
