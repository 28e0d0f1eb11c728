"""`run`: run requests offline under a given or searched schedule, and compare the run with its replay."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import xsimulator
from exegpt.api.compare import compare, slowdown_between
from exegpt.options.run import RunOptions
from xcore.batching import UNKNOWN, Hints
from xcore.choices import admission_rule, check_columns, check_prefix_caching, with_adjustment
from xcore.console import output
from xcore.console.comparison import Comparison
from xcore.console.schedule_text import schedule_text
from xcore.document import fingerprint, to_dict
from xcore.errors import Infeasible, InputError
from xcore.files import check_distinct, check_output, model_directory, read_schedule
from xcore.policies import TRAITS
from xcore.policies.adjustment import USUAL_SHARE
from xcore.requests.request import Request, Result
from xcore.requests.request_lists import read_for_model
from xcore.requests.shuffle import shuffled_places
from xcore.specs.model import ModelSpec
from xcore.specs.profile import Profile
from xcore.specs.schedule import Schedule, ranks_needed
from xcore.specs.workload import Workload
from xcore.tokenizer import load_tokenizer
from xprofiler.present_speed import slowdown_now
from xprofiler.profiles import find_profile, measured_profile, profile_text
from xrunner.comm.ranks import Agreed, Ranks
from xrunner.core.changes import run_adapting
from xrunner.core.engine import Engine
from xrunner.core.results import ResultFile, check_left
from xrunner.models import attention_planning
from xrunner.models.cache import checked_kv_dtype
from xrunner.models.device import find_device
from xrunner.models.weights import products_text
from xrunner.threads import set_threads
from xscheduler.ordering import check_known, request_hints
from xscheduler.policy_names import policy_names
from xscheduler.reschedule import rescheduler
from xscheduler.search_problem import Limits, with_variables
from xscheduler.setting_search import infeasible_text, search_schedule
from xscheduler.settings import Setting, find_model, find_setting, other_kv_text, run_dtype, run_kv_dtype
from xsimulator.estimates import GROWING

if TYPE_CHECKING:
    import torch

    from xcore.batching.admission import Admission
    from xprofiler.job import ProfilingJob
    from xscheduler.setting_search import SearchKeywords


@dataclass(frozen=True)
class RunInputs:
    """The input that rank 0 reads."""

    schedule: Schedule | None
    """The given schedule; None: the schedule is searched."""
    requests: tuple[Request, ...]
    rejected: tuple[Result, ...]
    attention: str
    """The attention kernels, as in `Model`."""
    described: str | None
    """The attention kernels with their version; None on the CPU."""
    notes: tuple[str, ...]
    """Why these attention kernels were chosen."""


@dataclass(frozen=True)
class RunPlan:
    """The schedule of a run, and the setting that it was searched for.

    Without a schedule, it has the reason why none is feasible, and the lowest latency in seconds.
    """

    schedule: Schedule | None
    setting: Setting
    reason: str | None
    lowest_latency_s: float | None


@dataclass(frozen=True)
class OfflineRun:
    """The result of a run on this rank."""

    inputs: RunInputs
    plan: RunPlan
    comparison: Comparison | None
    """The comparison, on the rank that gets the results, if there is a schedule."""


def run(options: RunOptions, ranks: Ranks) -> OfflineRun:
    """Plan the run and execute the requests that aren't done yet.

    All ranks call it. The rank that gets the results writes them.
    """
    if ranks.size > 1 and options.schedule is None and (options.profile is not None or options.no_profile):
        option = "--no-profile" if options.no_profile else f"--profile {options.profile}"
        raise Agreed(
            f"{ranks.size} ranks without a schedule measure their own profile: leave {option} out, or pass --schedule."
        )
    ranks.agree(options.alike)
    kind = ranks.agree(lambda: {"device": find_device(options.device, ranks.local).type})["device"]
    ranks.agree(lambda: {"threads": str(ranks.threads(options.threads))})
    set_threads(ranks.threads(options.threads))
    device = find_device(kind, ranks.local)
    inputs = ranks.share(lambda: _read(options, ranks, device), RunInputs)
    measured = _measured(options, inputs, ranks, device)
    plan = ranks.share(lambda: _plan(options, inputs, measured, kind, ranks.size), RunPlan)
    comparison = _run(options, inputs, plan, ranks, device) if plan.schedule else None
    return OfflineRun(inputs, plan, comparison)


def _read(options: RunOptions, ranks: Ranks, device: "torch.device") -> RunInputs:
    """Read the files of a run; InputError for input that can't be run, before any work."""
    check_output(options.report)
    check_distinct((options.out, options.report), (options.requests, options.schedule, options.profile))
    if options.out and ranks.size == 1:  # with several ranks, another one may write it
        check_output(options.out)
        check_left(options.out, options.resume)
    directory, schedule = model_directory(options.directory), _given_schedule(options)
    spec = ModelSpec.from_directory(directory)
    if schedule:
        schedule.check_model(spec)
    check_columns(None, options.requests, scale=options.scale_to_context)
    how = (options.columns, options.seed, output.note, options.skip_invalid, options.scale_to_context)
    requests, rejected = read_for_model(options.source, directory, spec, *how)
    check_known(options.order_choice, requests)
    if options.shuffle:
        places = shuffled_places([request.arrival_s for request in requests], options.shuffle, options.seed)
        requests = [requests[place] for place in places]
    for rejection in rejected:
        output.note(f"skipped: {rejection.reason}")
    dtype = run_dtype(options.dtype, schedule, spec, device.type)
    checked_kv_dtype(run_kv_dtype(options.kv_dtype, schedule, dtype), spec, dtype, device)
    attention, notes = attention_planning.choose_attention(
        options.attention, find_model(options.directory), dtype, device
    )
    results = tuple(rejection.result for rejection in rejected)
    kernels = attention_planning.described(attention, device)
    notes = (*notes, *products_text(dtype, device.type == "cpu"))
    return RunInputs(schedule, tuple(requests), results, attention, kernels, notes)


def _given_schedule(options: RunOptions) -> Schedule | None:
    """Return the schedule that the user passed; None without one.

    Raises InputError if its dtype differs from --dtype, or if its policy doesn't support --adjust.
    """
    if options.schedule is None:
        return None
    schedule = read_schedule(options.schedule)
    if options.dtype not in (None, "auto", schedule.dtype):
        raise InputError(
            f"The schedule is for {schedule.dtype}, and --dtype asks for {options.dtype}: tune with --dtype "
            f"{options.dtype}."
        )
    return with_adjustment(schedule, options.adjust, options.no_adjust)


def _measured(options: RunOptions, inputs: RunInputs, ranks: Ranks, device: "torch.device") -> "ProfilingJob | None":
    """Return the measured profile of the ranks, stored or new; None if the user chose another profile."""
    given = inputs.schedule
    if options.profile is not None or options.no_profile or (given and ranks_needed(given) != ranks.size):
        return None
    dtype = run_dtype(options.dtype, given, find_model(options.directory), device.type)
    kept = run_kv_dtype(options.kv_dtype, given, dtype)
    return measured_profile(Path(options.directory), dtype, ranks, device, inputs.attention, kv_dtype=kept)


def _plan(options: RunOptions, inputs: RunInputs, measured: "ProfilingJob | None", device: str, ranks: int) -> RunPlan:
    """Plan the run, and search a schedule if the user passed none."""
    setting = _setting(options, inputs, measured, device, inputs.schedule if ranks > 1 else None)
    setting = replace(setting, assumptions=(*setting.assumptions, *inputs.notes))
    try:
        schedule = _with_cache(inputs.schedule or _tuned_schedule(setting, options, inputs.requests), options)
    except Infeasible as error:  # an answer that all ranks get, not an error
        return RunPlan(None, setting, str(error), error.lowest_latency_s)
    if options.adjust is not None and not TRAITS[schedule.policy].adjustable:
        output.note(f"--adjust {options.adjust:g} has no effect under {schedule.policy}, the best policy here")
    return RunPlan(schedule, setting, None, None)


def _setting(
    options: RunOptions, inputs: RunInputs, measured: "ProfilingJob | None", device: str, shared: Schedule | None
) -> Setting:
    """Return the setting of a run, whose workload has the lengths of the requests.

    With several ranks and a schedule, the cluster is that of the schedule. Otherwise it is this machine's device, or
    the job's ranks. `measured` is the measured profile of the ranks, if the user chose no other profile.
    """
    if not inputs.requests:
        raise InputError("None of the requests can be run: correct those that were skipped.")
    workload = Workload.from_requests("requests", [request.lengths for request in inputs.requests])
    if shared is not None:
        spec, cluster = shared.model.spec, shared.cluster
        if measured:
            profile, which = measured.profile, profile_text(measured.profile)
        else:
            how = {"kv_dtype": shared.kv_dtype, "attention": inputs.attention}
            profile, which = find_profile(options.profile, spec, cluster, shared.dtype, **how)
            which = "; ".join(filter(None, (which, other_kv_text(shared.kv_dtype, profile))))
        if xsimulator.has_steady_state(shared):
            xsimulator.estimate(shared, profile)  # report missing data of the profile before any work
        return Setting(spec, cluster, workload, profile, shared.kv_dtype, (which,))
    if measured is None or measured.cluster.devices == 1:
        given = inputs.schedule
        setting = find_setting(
            options.directory,
            "local",
            workload,
            options.profile,
            dtype=given.dtype if given else options.dtype,
            kv_dtype=given.kv_dtype if given else options.kv_dtype,
            device=device,
            attention=inputs.attention,
        )
        if measured is None:
            return setting
        others = (text for text in setting.assumptions if not text.startswith("profile:"))
        assumptions = (*others, profile_text(measured.profile))  # it isn't stored if the machine was busy
        return replace(setting, profile=measured.profile, assumptions=assumptions)
    profile = measured.profile
    return Setting(
        find_model(options.directory),
        measured.cluster,
        workload,
        profile,
        profile.kv_dtype,
        (profile_text(profile),),
    )


def _tuned_schedule(setting: Setting, options: RunOptions, requests: Sequence[Request]) -> Schedule:
    """Return the best schedule for exactly these requests under the bound, with the fixed variables.

    For a long list, it is the best one in the steady state. Raises Infeasible if there is none.
    """
    from xscheduler.list_search import tune_list

    bound_s, fixed, rows = options.latency_bound_s, options.fixed, setting.workload.requests or ()
    caching = _policies_with_cache(options)
    policies = with_variables(options.policies or caching, fixed)
    grows = options.admission == "grow" and GROWING.issuperset(policies)  # else: the best that reserves then grows
    rules: tuple[Admission, ...] = ("grow",) if grows else ("reserve",)
    # No batch is larger than the list of requests, unless it is fixed: a fixed batch may exceed the list.
    batches = {TRAITS[policy].batch_name for policy in policies}
    most = None if batches & fixed.keys() else len(rows) or None
    share = None if options.no_adjust else USUAL_SHARE if options.adjust is None else options.adjust
    how: SearchKeywords = {
        "policies": policies,
        "fixed": fixed,
        "most_resident": most,
        "admission": rules,
        "adjust": share,
    }
    steady = search_schedule(setting, bound_s, **how)
    answer = tune_list(
        setting,
        steady,
        rows,
        Limits(bound_s),
        policies=tuple(policy for policy in policies if policy in caching) or policies,
        fixed=fixed,
        admission=rules,
        prompts=[request.prompt_ids for request in requests] if options.prefix_caching else None,
        adapt=lambda schedule: _with_cache(schedule, options),
    )
    if answer.schedule is None:
        raise Infeasible(infeasible_text(answer, bound_s), answer.lowest_latency_s)
    output.note(f"schedule: {schedule_text(answer.schedule)}")
    return answer.schedule


def _policies_with_cache(options: RunOptions) -> tuple[str, ...]:
    """Return the policies that support the requested admission and prefix caching in the steady state."""
    grows, caches = options.admission == "grow", options.prefix_caching
    fit = [n for n, traits in TRAITS.items() if (n in GROWING) >= grows and traits.caches_prefixes >= caches]
    return policy_names(",".join(fit) if grows or caches else None)


def _with_cache(schedule: Schedule, options: RunOptions) -> Schedule:
    """Return the schedule with the requested admission, prefix caching, KV blocks and adjustment."""
    rule = schedule.admission
    if options.admission is not None:
        rule = admission_rule(options.admission, schedule.policy)
    if options.prefix_caching and not schedule.prefix_caching:
        check_prefix_caching(schedule.policy, schedule.model.spec)
    caches, blocks = options.prefix_caching or schedule.prefix_caching, options.kv_blocks or schedule.kv_blocks
    schedule = replace(schedule, admission=rule, kv_blocks=blocks, prefix_caching=caches)
    share = options.adjust if schedule.traits.adjustable else None  # another policy may be the best
    return with_adjustment(schedule, share, options.no_adjust)


def _run(
    options: RunOptions, inputs: RunInputs, plan: RunPlan, ranks: Ranks, device: "torch.device"
) -> Comparison | None:
    """Load this rank's part of the model and run the requests that aren't done yet.

    One rank gets the results, writes them as they come, and returns the comparison.
    """
    directory, schedule, profile = Path(options.directory), plan.schedule, plan.setting.profile
    assert schedule
    hints = ranks.attempt(lambda: _hints(options, inputs, schedule, profile))
    engine = Engine.load(directory, schedule, ranks, device=device, attention=inputs.attention)
    fingerprint = run_fingerprint(directory, schedule, (*inputs.requests, *inputs.rejected))
    choice, of = options.order_choice, hints.__getitem__
    order, preemption = ranks.attempt(lambda: (choice.make(schedule, profile), choice.preemption(schedule)))
    with ExitStack() as stack:
        results = _Results(stack, options, fingerprint)
        ranks.agree(lambda: results.open(engine.leads))
        done = set().union(*ranks.all(tuple(results.file.done) if results.file else ()))
        left = [request for request in inputs.requests if request.id not in done]
        if results.file and done:
            output.note(f"resumed: {len(inputs.requests) - len(left)} of {len(inputs.requests)} requests were done")
        results.begin(len(left), engine.leads, [result for result in inputs.rejected if result.id not in done])
        before = slowdown_now(profile, engine.model, ranks)
        if options.adapt:
            again = rescheduler(plan.setting)
            engine, report = run_adapting(engine, directory, left, again, results.append)
        else:
            report = engine.run(left, results.append, None, order, lambda request: of(request.id), preemption)
        slowdown = slowdown_between(before, slowdown_now(profile, engine.model, ranks))
        if results.file and not engine.leads:
            results.file.leave()
    engine.close()
    if not engine.leads:
        return None
    return compare(schedule, profile, report, slowdown, left, order, hints, preemption)


def _hints(options: RunOptions, inputs: RunInputs, schedule: Schedule, profile: Profile) -> dict[str, Hints]:
    """Return the order's hints for each request, by id."""
    if options.order_choice.plain:
        return dict.fromkeys((request.id for request in inputs.requests), UNKNOWN)
    tokenizer = load_tokenizer(Path(options.directory)) if options.order_choice.name == "learned" else None
    return request_hints(options.order_choice, inputs.requests, schedule, profile, tokenizer)


class _Results:
    """Shows the progress of a run, and writes the results file until `stack` is closed.

    There is no file if none was requested, or if another rank leads.
    """

    def __init__(self, stack: ExitStack, options: RunOptions, fingerprint: str):
        self.file: ResultFile | None = None
        self._stack, self._fingerprint = stack, fingerprint
        self._out, self._resume = options.out, options.resume
        self._tokenizer = load_tokenizer(Path(options.directory)) if options.out else None
        self._progress: Callable[[int, int], None] = lambda finished, total: None
        self._finished, self._total = 0, 0

    def open(self, leads: bool) -> dict[str, str]:
        """Read the results of an interrupted run; InputError if the file can't be written.

        The result is empty: other ranks need not agree on anything.
        """
        if leads and self._out:
            check_output(self._out)
            self.file = self._stack.enter_context(ResultFile(self._out, self._fingerprint, self._resume))
        return {}

    def begin(self, total: int, leads: bool, rejected: Sequence[Result]) -> None:
        """Show the progress of `total` requests if this rank leads, and write the rejected requests."""
        self._total = total
        if leads:
            self._progress = self._stack.enter_context(output.progress("running requests"))
        if self.file:
            for result in rejected:
                self.file.append(result)

    def append(self, result: Result) -> None:
        """Write one more result with its text."""
        self._finished += 1
        self._progress(self._finished, self._total)
        if self._out and self.file is None:  # layers have moved, so this rank leads now
            self.file = self._stack.enter_context(ResultFile(self._out, self._fingerprint, resume=True))
        if self.file:
            text = self._tokenizer.decode(list(result.output_ids)) if self._tokenizer else None
            self.file.append(replace(result, text=text))


def run_fingerprint(directory: Path, schedule: Schedule, requests: Sequence[Request | Result]) -> str:
    """Return a hash of everything that must be the same to resume a run.

    It covers the weights, the schedule and the requests, including those that can't be run.
    """
    weights = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(directory.glob("*.safetensors"))]
    return fingerprint([weights, to_dict(schedule), [to_dict(r) for r in requests]])
