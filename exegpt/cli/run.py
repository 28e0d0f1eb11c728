"""`exegpt run`: runs requests offline and measures."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exegpt.cli import options

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from exegpt.cli.inputs import Setting
    from exegpt.report.comparison import Comparison
    from exegpt.request import Request, Result
    from exegpt.schedule import Schedule
    from xprofiler.job import Job
    from xrunner.ranks import Ranks


def run(
    model: options.MODEL_DIRECTORY,
    requests: Annotated[str, typer.Option("--requests", "-r", help="A JSONL or trace file, or - for standard input.")],
    schedule: options.SCHEDULE = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write one JSON line per result.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")] = False,
    skip_invalid: Annotated[bool, typer.Option("--skip-invalid", help="End invalid requests with an error.")] = False,
    latency_bound: Annotated[str, typer.Option("--latency-bound", "-l", help=options.LATENCY_BOUND_HELP)] = "inf",
    profile: options.PROFILE = None,
    no_profile: Annotated[
        bool,
        typer.Option(
            "--no-profile",
            help="Where this machine was never profiled, take its roofline instead of measuring a few points first.",
        ),
    ] = False,
    policy: options.POLICY = None,
    encode_batch: Annotated[int | None, typer.Option(min=1, help="Fix B_E.")] = None,
    decode_iterations: Annotated[int | None, typer.Option(min=1, help="Fix N_D.")] = None,
    micro_batches: Annotated[int | None, typer.Option(min=1, help="Fix B_m.")] = None,
    tp_degree: Annotated[int | None, typer.Option(min=1, help="Fix the tensor-parallel degree.")] = None,
    tp_gpus: Annotated[int | None, typer.Option(min=1, help="Fix the devices in tensor-parallel groups.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Fix the most resident sequences.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, max=10_000_000, help="Fix the token budget.")
    ] = None,
    adjust: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="RRA, WAA: pick prompts so that a batch's tokens stay this near their mean."
        ),
    ] = None,
    adapt: Annotated[
        bool, typer.Option("--adapt", help="Search again where lengths change, and change the schedule while running.")
    ] = False,
    columns: options.COLUMNS = None,
    seed: options.SEED = 0,
    device: options.DEVICE = None,
    dtype: options.RUN_DTYPE = None,
    threads: options.THREADS = None,
    report: options.REPORT = None,
    json: options.JSON = False,
) -> None:
    """Run requests offline and measure, beside what was predicted. Without a schedule one is searched first.

    A machine that was never profiled is measured at a few points first, which takes seconds. A schedule of several
    devices needs a rank for each; ranks without one measure themselves and search one for as many devices.

    Example: exegpt run --model my-model --requests requests.jsonl --out results.jsonl

    Example: mpirun -n 4 exegpt run --model my-model --schedule schedule.json --requests requests.jsonl
    """
    from exegpt.cli import inputs, output
    from exegpt.cli.own_profile import own_profile
    from exegpt.cli.shortlist import checked_by
    from exegpt.duration import parse_duration
    from exegpt.errors import InputError
    from exegpt.models.device import find_device
    from exegpt.request import Request, Result
    from exegpt.schedule import Schedule
    from xrunner.place import ranks_needed
    from xrunner.ranks import Agreed, job
    from xrunner.results import check_left

    if resume and out is None:
        raise InputError("--resume needs --out: it goes on with that file.")
    if no_profile and profile is not None:
        raise InputError(
            f"--no-profile leaves out what --profile '{profile}' doesn't do, to measure first: leave one of them out."
        )

    fixed = {
        "encode_batch": encode_batch,
        "decode_iterations": decode_iterations,
        "micro_batches": micro_batches,
        "tp_degree": tp_degree,
        "tp_gpus": tp_gpus,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
    }
    if schedule:
        _check_unsearched(schedule, policy, None if latency_bound == "inf" else latency_bound, fixed)

    def read() -> tuple[Any, ...]:
        output.check_output(report)
        if out and ranks.size == 1:  # of several, another rank may write it
            output.check_output(out)
            check_left(out, resume)
        inputs.policy_names(policy), parse_duration(latency_bound)  # a bad one is told before seconds of work
        directory, given = inputs.model_directory(model), _given(schedule, dtype)
        wanted, rejected = _read(directory, given, requests, columns, seed, skip_invalid)
        return given, tuple(wanted), tuple(rejected)

    def choose() -> tuple[Any, ...]:
        apart = given if ranks.size > 1 else None
        asked_dtype = given.dtype if given else dtype
        setting = run_setting(Path(model), wanted, profile, apart, own, kind, asked_dtype)
        return given or tuned_schedule(setting, latency_bound, policy, **fixed), setting

    with job() as ranks:
        if ranks.size > 1 and schedule is None and (profile is not None or no_profile):
            option = "--no-profile" if no_profile else f"--profile {profile}"
            raise Agreed(
                f"{ranks.size} ranks without a schedule measure themselves: leave {option} out, or pass --schedule."
            )
        typed = {
            "model": model,
            "schedule": schedule,
            "requests": requests,
            "out": out,
            "resume": resume,
            "adapt": adapt,
            "adjust": adjust,
            "profile": profile,
            "no_profile": no_profile,
        }
        ranks.agree(lambda: {name: str(value) for name, value in typed.items()})
        kind = ranks.agree(lambda: {"device": find_device(device, ranks.local).type})["device"]
        ranks.agree(lambda: {"threads": str(ranks.threads(threads))})
        inputs.set_threads(ranks.threads(threads))
        given, wanted, rejected = ranks.share(read, Schedule, Request, Result)
        there, own = find_device(kind, ranks.local), None
        if profile is None and not no_profile and (given is None or ranks_needed(given) == ranks.size):
            own = own_profile(Path(model), inputs.run_dtype(dtype, given, kind), ranks, there)
        asked = _Asked(Path(model), *ranks.share(choose, inputs.Setting, Schedule), wanted, rejected)
        done = _run(asked, ranks, there, out, resume, adapt, adjust)
    if done is None:
        return
    if report:
        write_report(report, f"{asked.setting.model.name}: a run", asked.setting, [done])
    if json:
        return output.emit(done.document() | {"schedule": _plain(asked.schedule), **_closing(asked.setting, seed)})
    rows = asked.setting.workload.requests or ()
    _print(done, asked.setting, "steady state" if schedule else checked_by(rows))


@dataclass(frozen=True)
class _Asked:
    """What is to be run, on every rank."""

    directory: Path
    schedule: "Schedule"
    setting: "Setting"
    requests: "tuple[Request, ...]"
    rejected: "tuple[Result, ...]"


def _given(path: Path | None, dtype: str | None) -> "Schedule | None":
    """The schedule that was passed; InputError where it isn't for this dtype."""
    from exegpt.cli import inputs
    from exegpt.errors import InputError

    if path is None:
        return None
    given = inputs.read_schedule(path)
    if dtype not in (None, given.dtype):
        raise InputError(f"The schedule is for {given.dtype}, and --dtype asks for {dtype}: tune with --dtype {dtype}.")
    return given


def _read(
    directory: Path, given: "Schedule | None", source: str, columns: str | None, seed: int, skip_invalid: bool
) -> "tuple[list[Request], list[Result]]":
    """The requests that can be run, and the results of those that can't."""
    from exegpt.cli import output
    from exegpt.columns import parse_columns
    from exegpt.model import ModelSpec
    from xrunner.requests import read_requests

    spec = ModelSpec.from_directory(directory)
    if given:
        given.check_model(spec)
    tokenizer = load_tokenizer(directory)
    encode = (lambda text: tokenizer.encode(text).ids) if tokenizer else None
    named = parse_columns(columns) if columns else None
    how = {"seed": seed, "columns": named, "skip_invalid": skip_invalid}
    wanted, rejected = read_requests(source, spec, encode, note=output.note, **how)
    for one in rejected:
        output.note(f"skipped: {one.reason}")
    return wanted, [one.result for one in rejected]


def load_tokenizer(directory: Path) -> Any:
    """The model's tokenizer, None where it has none."""
    from exegpt.errors import InputError

    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise InputError(f"'{path}' is not a tokenizer: {error}.") from None


def _check_unsearched(
    schedule: Path, policy: str | None, latency_bound: str | None, fixed: "dict[str, int | None]"
) -> None:
    """InputError for what only a search would heed, beside a schedule that is given."""
    from exegpt.errors import InputError

    asked = {"--policy": policy, "--latency-bound": latency_bound}
    asked |= {f"--{name.replace('_', '-')}": value for name, value in fixed.items()}
    for option, value in asked.items():
        if value is not None:
            raise InputError(
                f"The schedule '{schedule}' is run as it stands: leave {option} {value} or --schedule out."
            )


def run_setting(
    directory: Path,
    requests: "Sequence[Request]",
    profile: str | None,
    given: "Schedule | None" = None,
    own: "Job | None" = None,
    device: str = "cpu",
    dtype: str | None = None,
) -> "Setting":
    """The setting of a run: a given schedule's cluster, else that of this machine's device or of the job's ranks. The
    workload is the requests' own. `own` is what the ranks were measured to be, where nothing else was asked for.
    """
    import xsimulator
    from exegpt.cli import inputs
    from exegpt.cli.own_profile import profile_text
    from exegpt.errors import InputError
    from exegpt.workload import Workload

    if not requests:
        raise InputError("None of the requests can be run.")
    workload = Workload.from_requests("requests", [request.lengths for request in requests])
    if given is not None:
        spec, cluster = given.model.spec, given.cluster
        measured = (own.profile, profile_text(own.profile)) if own else None
        found, which = measured or inputs.find_profile(profile, spec, cluster, given.dtype)
        setting = inputs.Setting(spec, cluster, workload, found, given.kv_dtype, (which,))
        xsimulator.estimate(given, found)  # what the profile can't answer is said before any work
        return setting
    if own is None or own.cluster.devices == 1:
        return inputs.find_setting(str(directory), "local", workload, profile, dtype=dtype, device=device)
    spec = inputs.find_model(str(directory))
    return inputs.Setting(spec, own.cluster, workload, own.profile, own.profile.dtype, (profile_text(own.profile),))


def tuned_schedule(setting: "Setting", latency_bound: str, policy: str | None, **fixed: int | None) -> "Schedule":
    """The best schedule under the bound, for these very requests where they are few, with the fixed variables as given;
    Infeasible where there is none.
    """
    from exegpt.cli import inputs, output
    from exegpt.cli.answer import infeasible_text, schedule_text, search_schedule
    from exegpt.cli.listing import with_variables
    from exegpt.cli.shortlist import for_these
    from exegpt.duration import parse_duration
    from exegpt.errors import Infeasible

    bound_s = parse_duration(latency_bound)
    by_hand = {name: value for name, value in fixed.items() if value is not None}
    rows = setting.workload.requests or ()
    named = with_variables(inputs.policy_names(policy), by_hand)
    # No batch is larger than the list of requests, unless it is fixed: then it may wait for more than there are.
    most = None if {"encode_batch", "max_num_seqs"} & by_hand.keys() else len(rows) or None
    answer = search_schedule(setting, bound_s, policies=named, fixed=by_hand, most_resident=most)
    if answer.schedule is None:
        raise Infeasible(infeasible_text(answer, bound_s), answer.lowest_latency_s)
    answer = for_these(answer, setting.profile, rows)
    assert answer.schedule
    output.note(f"schedule: {schedule_text(answer.schedule)}")
    return answer.schedule


def _run(
    asked: _Asked,
    ranks: "Ranks",
    device: "torch.device",
    out: Path | None,
    resume: bool,
    adapt: bool,
    adjust: float | None,
) -> "Comparison | None":
    """Load this rank's part of the model and run what isn't done yet. One rank gets the results, writes them to `out`
    as they come, and returns what came of it all.
    """
    from contextlib import ExitStack

    from exegpt.cli import output
    from exegpt.cli.execute import compare, least, slowdown_now
    from exegpt.cli.rescheduling import rescheduling
    from xrunner.changes import run_adapting
    from xrunner.engine import Engine
    from xrunner.results import ResultFile

    engine = Engine.load(asked.directory, asked.schedule, ranks, device=device)
    fingerprint = run_fingerprint(asked.directory, asked.schedule, asked.requests)
    opened = []

    def open_file() -> dict[str, str]:
        if engine.speaks and out:
            output.check_output(out)
            opened.append(ResultFile(out, fingerprint, resume))
        return {}

    ranks.agree(open_file)
    file = opened[0] if opened else None
    before = set().union(*ranks.all(tuple(file.done) if file else ()))
    left = [request for request in asked.requests if request.id not in before]
    if file and before:
        output.note(f"resumed: {len(asked.requests) - len(left)} of {len(asked.requests)} requests were done")
    tokenizer = load_tokenizer(asked.directory) if out else None
    with ExitStack() as stack:
        progress = stack.enter_context(output.progress("running requests")) if engine.speaks else None
        if file:
            stack.enter_context(file)
            for result in asked.rejected:
                if result.id not in before:
                    file.append(result)
        finished = 0

        def on_finish(result: "Result") -> None:
            nonlocal finished, file
            finished += 1
            if progress:
                progress(finished, len(left))
            if out and file is None:  # layers have moved, and now this rank speaks
                file = stack.enter_context(ResultFile(out, fingerprint, resume=True))
            if file:
                text = tokenizer.decode(list(result.output_ids)) if tokenizer else None
                file.append(replace(result, text=text))

        before = slowdown_now(asked.setting.profile, engine.model, ranks)
        if adapt:
            again = rescheduling(asked.setting)
            engine, report = run_adapting(engine, asked.directory, left, again, on_finish, adjust)
        else:
            report = engine.run(left, on_finish, adjustment=adjust)
        slowdown = least(before, slowdown_now(asked.setting.profile, engine.model, ranks))
        if file and not engine.speaks:
            file.leave()
    engine.close()
    return compare(asked.schedule, asked.setting.profile, report, adjust, slowdown) if engine.speaks else None


def run_fingerprint(directory: Path, schedule: "Schedule", requests: "Sequence[Request]") -> str:
    """What must be the same for a run to be resumed: weights, schedule and requests."""
    from exegpt.document import fingerprint, to_dict

    weights = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(directory.glob("*.safetensors"))]
    return fingerprint([weights, to_dict(schedule), [to_dict(r) for r in requests]])


def _plain(schedule: "Schedule") -> dict[str, Any]:
    from exegpt.document import to_dict

    return to_dict(schedule)


def _closing(setting: "Setting", seed: int) -> dict[str, Any]:
    from exegpt.cli import output

    return {
        "assumptions": list(setting.assumptions),
        "provenance": output.provenance(setting.profile, seed),
    }


def _print(done: "Comparison", setting: "Setting", checked: str) -> None:
    from exegpt.cli import output
    from exegpt.cli.answer import schedule_text
    from exegpt.cli.execute import COMPARISON_COLUMNS, bound_text, comparison_rows
    from exegpt.cli.own_profile import speed_text

    for text in setting.assumptions:
        output.note(f"· {text}")
    output.table(COMPARISON_COLUMNS, comparison_rows([done]), schedule_text(done.schedule))
    for change in done.changes:
        paused = f"{'layers moved' if change.moved else 'another cache'}, {output.seconds(change.pause_s)} without work"
        how = paused if change.pause_s else "without a pause"
        if change.refused:
            how += f"; the run kept its schedule: {change.refused}"
        print(f"At {output.seconds(change.changed_s)}, for other lengths: {schedule_text(change.schedule)}; {how}.")
    print(f"{len(done.results):,} requests, {done.tokens:,} output tokens in {output.seconds(done.seconds)}.")
    if text := bound_text(done, checked):
        print(text)
    if text := speed_text(done.slowdown):
        output.note(f"· {text}")


def write_report(path: Path, title: str, setting: "Setting", comparisons: "list[Comparison]") -> None:
    """An HTML report with the frontier of all policies and these runs."""
    import math

    from exegpt import document
    from exegpt.cli.answer import frontier, frontier_bounds, report_facts, schedule_text, search_schedule
    from exegpt.report.html import Report, page

    chosen = comparisons[0].schedule
    answers = [search_schedule(setting, b, bound=chosen.bound) for b in frontier_bounds(setting, bound=chosen.bound)]
    bound_s = chosen.latency_bound_s if chosen.latency_bound_s and math.isfinite(chosen.latency_bound_s) else None
    facts = (*report_facts(setting), ("schedule", schedule_text(chosen)))
    report = Report(title, facts, setting.workload, frontier(answers), bound_s, tuple(comparisons))
    document.write_text(path, page(report))
