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
    from xrunner.comm.ranks import Ranks


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
    admission: options.ADMISSION = None,
    prefix_caching: options.PREFIX_CACHING = False,
    kv_blocks: Annotated[
        int | None, typer.Option(min=1, help="KV blocks on each stage, fewer or more than the schedule's.")
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
    attention: options.ATTENTION = None,
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
    from exegpt.cli import output
    from exegpt.cli.execute import write_report
    from exegpt.cli.shortlist import checked_by
    from xrunner.comm.ranks import job

    fixed = {
        "encode_batch": encode_batch,
        "decode_iterations": decode_iterations,
        "micro_batches": micro_batches,
        "tp_degree": tp_degree,
        "tp_gpus": tp_gpus,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
    }
    typed = _Typed(
        *(model, schedule, requests, out, resume, adapt, adjust, admission, prefix_caching, kv_blocks, profile),
        *(
            no_profile,
            skip_invalid,
            latency_bound,
            policy,
            fixed,
            columns,
            seed,
            device,
            attention,
            dtype,
            threads,
            report,
        ),
    )
    typed.check()
    with job() as ranks:
        asked, there = _asked(typed, ranks)
        done = _run(asked, ranks, there, out, resume, adapt, adjust) if asked.schedule else None
    if asked.schedule is None:
        return _refuse(asked, ranks.rank, seed, json)
    if done is None:
        return
    if report:
        write_report(report, f"{asked.setting.model.name}: a run", asked.setting, [done])
    if json:
        return output.emit(done.document() | {"schedule": _plain(asked.schedule), **_closing(asked, seed)})
    rows = asked.setting.workload.requests or ()
    _print(done, asked.setting, "steady state" if schedule else checked_by(rows))


@dataclass(frozen=True)
class _Typed:
    """What was typed, as `run` names it; the fields up to `no_profile` must be alike on all ranks."""

    model: str
    schedule: Path | None
    requests: str
    out: Path | None
    resume: bool
    adapt: bool
    adjust: float | None
    admission: str | None
    prefix_caching: bool
    kv_blocks: int | None
    profile: str | None
    no_profile: bool
    skip_invalid: bool
    latency_bound: str
    policy: str | None
    fixed: "dict[str, int | None]"
    columns: str | None
    seed: int
    device: str | None
    attention: str | None
    dtype: str | None
    threads: int | None
    report: Path | None

    def check(self) -> None:
        """InputError for options that contradict each other."""
        from exegpt.errors import InputError

        if self.resume and self.out is None:
            raise InputError("--resume needs --out: it goes on with that file.")
        if self.no_profile and self.profile is not None:
            raise InputError(
                f"--no-profile leaves out what --profile '{self.profile}' doesn't do, to measure first: leave one of "
                "them out."
            )
        if self.adapt and self.admission == "grow":
            raise InputError("--adapt searches schedules that reserve: leave --admission grow or --adapt out.")
        if self.adapt and self.prefix_caching:
            raise InputError(
                "--adapt searches schedules without prefix caching: leave --prefix-caching or --adapt out."
            )
        if self.schedule:
            bound = None if self.latency_bound == "inf" else self.latency_bound
            _check_unsearched(self.schedule, self.policy, bound, self.fixed)

    def alike(self) -> dict[str, str]:
        """What must be the same on all ranks."""
        names = ("model", "schedule", "requests", "out", "resume", "adapt", "adjust", "admission", "kv_blocks")
        names += ("prefix_caching", "profile", "no_profile")
        return {name: str(getattr(self, name)) for name in names}

    def read(self, ranks: "Ranks", device: "torch.device") -> tuple[Any, ...]:
        """The schedule, requests, results of requests that can't run, attention with version, what `auto` chose."""
        from exegpt.cli import inputs, output
        from exegpt.duration import parse_duration
        from exegpt.errors import InputError
        from exegpt.models.planning import choose_attention, described
        from exegpt.policies import TRAITS
        from xrunner.core.results import check_left

        output.check_output(self.report)
        output.check_distinct((self.out, self.report), (self.requests, self.schedule, self.profile))
        if self.out and ranks.size == 1:  # of several, another rank may write it
            output.check_output(self.out)
            check_left(self.out, self.resume)
        inputs.policy_names(self.policy), parse_duration(self.latency_bound)  # bad ones are told before seconds of work
        directory, given = inputs.model_directory(self.model), _given(self.schedule, self.dtype)
        if given and self.adjust is not None and not TRAITS[given.policy].adjustable:
            adjustable = ", ".join(traits.name for traits in TRAITS.values() if traits.adjustable)
            raise InputError(
                f"--adjust {self.adjust:g} is for {adjustable}, and the schedule's policy is {given.policy}: "
                "leave it out."
            )
        wanted, rejected = _read(directory, given, self.requests, self.columns, self.seed, self.skip_invalid)
        dtype = inputs.run_dtype(self.dtype, given, device.type)
        chosen, why = choose_attention(self.attention, inputs.find_model(self.model), dtype, device)
        return given, tuple(wanted), tuple(rejected), (chosen, described(chosen, device)), why


def _asked(typed: _Typed, ranks: "Ranks") -> "tuple[_Asked, torch.device]":
    """What all ranks run, and this one's device: read by rank 0, measured by all, and searched by rank 0."""
    from exegpt.cli import inputs, output
    from exegpt.cli.own_profile import own_profile
    from exegpt.errors import Infeasible
    from exegpt.models.device import find_device
    from exegpt.policies import TRAITS
    from exegpt.request import Request, Result
    from exegpt.schedule import Schedule
    from xrunner.comm.place import ranks_needed
    from xrunner.comm.ranks import Agreed

    profile, no_profile, dtype = typed.profile, typed.no_profile, typed.dtype
    if ranks.size > 1 and typed.schedule is None and (profile is not None or no_profile):
        option = "--no-profile" if no_profile else f"--profile {profile}"
        raise Agreed(
            f"{ranks.size} ranks without a schedule measure themselves: leave {option} out, or pass --schedule."
        )
    ranks.agree(typed.alike)
    kind = ranks.agree(lambda: {"device": find_device(typed.device, ranks.local).type})["device"]
    ranks.agree(lambda: {"threads": str(ranks.threads(typed.threads))})
    inputs.set_threads(ranks.threads(typed.threads))
    directory, there, own = Path(typed.model), find_device(kind, ranks.local), None
    read = ranks.share(lambda: typed.read(ranks, there), Schedule, Request, Result)
    given, wanted, rejected, (attention, version), why = read
    if profile is None and not no_profile and (given is None or ranks_needed(given) == ranks.size):
        own = own_profile(directory, inputs.run_dtype(dtype, given, kind), ranks, there, attention)

    def choose() -> tuple[Any, ...]:
        shared = given if ranks.size > 1 else None
        run_dtype = given.dtype if given else dtype
        setting = run_setting(directory, wanted, profile, shared, own, kind, run_dtype, attention)
        setting = replace(setting, assumptions=(*setting.assumptions, *why))
        try:
            policy = typed.policy or _policies_with(typed.admission == "grow", typed.prefix_caching)
            chosen = given or tuned_schedule(setting, typed.latency_bound, policy, **typed.fixed)
            chosen = _with_cache(chosen, typed.admission, typed.kv_blocks, typed.prefix_caching)
        except Infeasible as error:  # an answer, which all ranks get
            return None, setting, str(error), error.lowest_latency_s
        if typed.adjust is not None and not TRAITS[chosen.policy].adjustable:
            output.note(f"--adjust {typed.adjust:g} changes nothing under {chosen.policy}, the best policy here")
        return chosen, setting, None, None

    schedule, setting, reason, lowest_s = ranks.share(choose, inputs.Setting, Schedule)
    return _Asked(directory, schedule, setting, wanted, rejected, attention, version, reason, lowest_s), there


def _policies_with(grows: bool, caches_prefixes: bool) -> str | None:
    """The policies that have what is asked of the cache; None for any."""
    from exegpt.policies import TRAITS

    fit = [t for t in TRAITS.values() if t.grows >= grows and t.caches_prefixes >= caches_prefixes]
    return ",".join(traits.name for traits in fit) if grows or caches_prefixes else None


def _with_cache(schedule: "Schedule", admission: str | None, kv_blocks: int | None, prefix_caching: bool) -> "Schedule":
    """The schedule with the cache that was asked for."""
    from exegpt.cli import inputs

    rule = schedule.admission
    if admission is not None:
        rule = inputs.admission_rule(admission, schedule.policy)
    caches = schedule.prefix_caching
    if prefix_caching and not caches:
        inputs.check_prefix_caching(schedule.policy, schedule.model.spec)
        caches = True
    blocks = kv_blocks or schedule.kv_blocks
    return replace(schedule, admission=rule, kv_blocks=blocks, prefix_caching=caches)


def _refuse(asked: "_Asked", rank: int, seed: int, json: bool) -> None:
    """Infeasible, with its document where one was asked for; other ranks end with the same code and say nothing."""
    from exegpt.cli import INFEASIBLE, output
    from exegpt.errors import Infeasible

    if rank:
        raise SystemExit(INFEASIBLE)
    if json:
        lowest = {"schedule": None, "lowest_latency_s": asked.lowest_latency_s, "reason": asked.reason}
        output.emit(lowest | _closing(asked, seed))
    raise Infeasible(asked.reason or "", asked.lowest_latency_s)


@dataclass(frozen=True)
class _Asked:
    """What is to be run, on every rank; without a schedule, why none is feasible, and the lowest latency in seconds."""

    directory: Path
    schedule: "Schedule | None"
    setting: "Setting"
    requests: "tuple[Request, ...]"
    rejected: "tuple[Result, ...]"
    attention: str
    """As in `Model`."""
    described: str | None
    """The same with its version; None on the CPU."""
    reason: str | None
    lowest_latency_s: float | None


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
    from xrunner.core.requests import read_requests

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
    attention: str = "triton",
) -> "Setting":
    """The setting of a run: a given schedule's cluster, else that of this machine's device or of the job's ranks. The
    workload is the requests' own. `own` is what the ranks were measured to be, where nothing else was asked for.
    `attention` as in `Model`.
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
        found, which = measured or inputs.find_profile(profile, spec, cluster, given.dtype, attention=attention)
        setting = inputs.Setting(spec, cluster, workload, found, given.kv_dtype, (which,))
        if xsimulator.has_steady_state(given):
            xsimulator.estimate(given, found)  # what the profile can't answer is said before any work
        return setting
    if own is None or own.cluster.devices == 1:
        how = {"dtype": dtype, "device": device, "attention": attention}
        return inputs.find_setting(str(directory), "local", workload, profile, **how)
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
    from xrunner.core.changes import run_adapting
    from xrunner.core.engine import Engine
    from xrunner.core.results import ResultFile

    assert asked.schedule
    engine = Engine.load(asked.directory, asked.schedule, ranks, device=device, attention=asked.attention)
    fingerprint = run_fingerprint(asked.directory, asked.schedule, (*asked.requests, *asked.rejected))
    opened = []

    def open_file() -> dict[str, str]:
        if engine.leads and out:
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
        progress = stack.enter_context(output.progress("running requests")) if engine.leads else None
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
            if out and file is None:  # layers have moved, and now this rank leads
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
        if file and not engine.leads:
            file.leave()
    engine.close()
    if not engine.leads:
        return None
    return compare(asked.schedule, asked.setting.profile, report, adjust, slowdown, left)


def run_fingerprint(directory: Path, schedule: "Schedule", requests: "Sequence[Request | Result]") -> str:
    """What must be the same for a run to be resumed: weights, schedule and requests, those that can't be run too."""
    from exegpt.document import fingerprint, to_dict

    weights = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(directory.glob("*.safetensors"))]
    return fingerprint([weights, to_dict(schedule), [to_dict(r) for r in requests]])


def _plain(schedule: "Schedule") -> dict[str, Any]:
    from exegpt.document import to_dict

    return to_dict(schedule)


def _closing(asked: "_Asked", seed: int) -> dict[str, Any]:
    from exegpt.cli import output

    setting = asked.setting
    return {
        "assumptions": list(setting.assumptions),
        "provenance": output.provenance(setting.profile, seed, attention=asked.described),
    }


def _print(done: "Comparison", setting: "Setting", checked: str) -> None:
    from exegpt.cli import output
    from exegpt.cli.answer import schedule_text
    from exegpt.cli.execute import COMPARISON_COLUMNS, bound_text, comparison_rows
    from exegpt.cli.own_profile import speed_text

    for text in setting.assumptions:
        output.note(f"· {text}")
    output.table(COMPARISON_COLUMNS, comparison_rows([done]), schedule_text(done.schedule))
    if done.schedule.admission == "grow":
        output.note(f"· {done.preemptions:,} preemptions, {done.predicted_preemptions:,} predicted")
    if done.schedule.prefix_caching:
        output.note(f"· {done.reused:,} tokens found in the cache, {done.predicted_reused:,} predicted")
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
