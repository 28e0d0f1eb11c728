"""`simulate`: predict the performance of a schedule, or of a running engine's settings."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import xsimulator
from exegpt.api.agent_turns import AgentTurns, check_closed_loop, drawn_turns, full_load_text, loop_facts
from exegpt.api.tune_settings import drafts_of
from exegpt.options.option_record import option_name, option_words, typed_options
from exegpt.options.simulate import SimulateOptions
from exegpt.options.values import only_profile
from exegpt.report.figures import (
    ESTIMATE_COLUMNS,
    PERCENTILES,
    cache_text,
    estimate_rows,
    percentile_rows,
    steady_notes,
)
from xcore import document
from xcore.choices import check_prefix_caching, with_adjustment
from xcore.columns import parse_columns
from xcore.document import to_dict
from xcore.duration import duration_text
from xcore.errors import InputError
from xcore.files import read_schedule
from xcore.quantity import counted, figure_text, percent_text
from xcore.requests.shuffle import shuffled_places
from xcore.specs.acceptance import Acceptance
from xcore.specs.prefix_hit import hit_text, with_prefix_hit
from xcore.specs.profile import Profile
from xcore.specs.request_times import latencies, percentiles
from xcore.specs.schedule import Schedule
from xcore.specs.speculation import Speculation
from xcore.specs.timeline import Timeline, chrome_trace
from xcore.specs.workload import RequestLengths, Workload
from xcore.traces.fit_context import fit_context
from xcore.traces.labels import Labels
from xcore.traces.trace import AFTER, form_of, labels_of, parse_rate, read_labels, read_trace, with_poisson_arrivals
from xprofiler import rooflines
from xprofiler.kernel_import import KernelImport, kernel_import
from xprofiler.profiles import as_found, find_profile
from xscheduler.application_runs import dependencies, run_completions
from xscheduler.drafts import DraftGain, Drafts, draft_gain, gain_texts
from xscheduler.engine_settings import EngineSettings, follow, resident
from xscheduler.launch_command import POLICY, Launch, read_launch
from xscheduler.ordering import USUAL_TAU, trace_hints
from xscheduler.settings import find_setting, for_schedule, other_kv_text, with_draft

if TYPE_CHECKING:
    from xsimulator.replay.event_simulator import Replay


@dataclass(frozen=True)
class Prediction:
    """The result of a simulation."""

    schedule: Schedule
    profile: Profile
    assumptions: tuple[str, ...]
    facts: dict[str, object]
    """The figures for scripts."""
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The figures for people."""
    timeline: Callable[[], Timeline]
    texts: tuple[str, ...] = ()
    """Sentences that don't fit in a table."""
    kernels: KernelImport | None = None
    """The kernel import that could replace the data sheet."""
    drafting: DraftGain | None = None
    """The gain of drafting by the batch; None without speculative decoding."""


def simulate(
    options: SimulateOptions,
    settings: Mapping[str, object] | None = None,
    longest: int | None = None,
    workload: Workload | None = None,
) -> Prediction:
    """Return the requested prediction, and write its timeline.

    Args:
        options: The command's options.
        settings: An engine's settings by name, in addition to the options.
        longest: Tokens of the longest request that the server accepts.
        workload: The workload, instead of the options'.
    """
    notes: tuple[str, ...] = ()
    if options.command:
        launch = read_launch(options.command)
        options, settings = _launched(options, launch)
        longest, notes = launch.longest, launch.notes
    check_closed_loop(options)
    if options.prefix_hit:
        if options.prefix_caching is False:
            raise InputError(f"--no-prefix-caching contradicts --prefix-hit {options.prefix_hit:g}: leave one out.")
        options = replace(options, prefix_caching=None if options.schedule else True)
    if (options.rate or options.agents) and not options.replay and form_of(options.workload or ""):
        options = replace(options, replay=options.workload)
    if not options.order_choice.plain and not options.one_by_one:
        raise InputError(
            "--order, --starvation-guard and --preempt need --replay or --rate: a steady state has no order."
        )
    if options.out and not options.one_by_one:
        raise InputError(f"--out '{options.out}' needs --replay or --rate, which simulate requests: leave it out.")
    if options.shuffle and not options.replay:
        raise InputError(f"--shuffle {options.shuffle} reorders the requests of --replay: pass it, or leave it out.")
    if options.shuffle and options.agents:
        raise InputError(f"--shuffle {options.shuffle} would mix the turns of --agents {options.agents}: drop one.")
    engine_settings = EngineSettings.of(vars(options) | dict(settings or {}))
    if options.schedule:
        schedule, profile, assumptions = _of_file(options, options.schedule, engine_settings)
        profile = for_schedule(profile, schedule)
    elif options.model:
        schedule, profile, assumptions = _of_engine(options, engine_settings, workload)
    else:
        raise InputError(
            "There is nothing to simulate: pass --schedule FILE, or an engine's settings, like --model, --cluster and "
            "--max-num-seqs."
        )
    schedule = with_adjustment(schedule, options.adjust, options.no_adjust)
    _check_longest(schedule, longest)
    kernels = kernel_import(profile, schedule.model.spec, schedule.cluster, schedule.kv_dtype, options.model)
    assumptions = (*notes, *assumptions, *([kernels.text] if kernels else []))
    if options.one_by_one:
        prediction = _replay(schedule, profile, assumptions, options)
    else:
        prediction = _steady(schedule, profile, assumptions)
    if options.timeline:
        trace = chrome_trace([prediction.timeline()])
        document.write_text(options.timeline, document.dumps(trace, indent=None))
    gain = draft_gain(schedule, profile, _drafts_of(schedule.speculation)) if schedule.speculation else None
    texts = (*prediction.texts, *(f"{text[0].upper()}{text[1:]}." for text in (gain_texts(gain) if gain else ())))
    assumptions = tuple(dict.fromkeys(prediction.assumptions))
    return replace(prediction, assumptions=assumptions, texts=texts, kernels=kernels, drafting=gain)


def _drafts_of(speculation: Speculation) -> Drafts:
    """Return the drafts of a schedule, whose number is fixed."""
    known = Acceptance({speculation.drafted: speculation.acceptance}, "of the schedule")
    return Drafts(known, (speculation.drafted,), speculation.layers, speculation.draft)


def _launched(options: SimulateOptions, launch: Launch) -> tuple[SimulateOptions, dict[str, object]]:
    """Return the options with those of a launch command, and its other settings.

    Raises InputError for an option that the command contains too.
    """
    if options.schedule:
        raise InputError("--command and --schedule both set what is simulated: leave one of them out.")
    said = {"model": launch.model, "policy": POLICY, **launch.settings}
    for name, value in typed_options(options, SimulateOptions).items():
        if name in said:
            typed = " ".join(option_words(name, value))
            raise InputError(f"--command contains the setting of {option_name(name)} too: leave {typed} out.")
    known = {name: said.pop(name) for name in list(said) if name in SimulateOptions.__dataclass_fields__}
    return replace(options, engine=options.engine or launch.engine, **known), said


def _of_engine(
    options: SimulateOptions, settings: EngineSettings, workload: Workload | None
) -> tuple[Schedule, Profile, tuple[str, ...]]:
    """Return the schedule that an engine follows, its profile, and the assumptions made."""
    setting = find_setting(
        options.model,
        options.cluster,
        workload or options.workload or options.replay,
        only_profile(options.profile),
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        memory_fraction=options.memory_fraction,
        expert_parallel=options.expert_parallel,
        attention_dp=options.attention_dp,
        columns=options.columns,
        scale_to_context=options.scale_to_context,
        engine=options.engine,
        front_end=options.front_end,
        one_by_one=options.one_by_one,
    )
    if options.prefix_hit:
        check_prefix_caching(settings.policy, setting.model, f"--prefix-hit {options.prefix_hit:g}")
        setting = setting.with_prefix_hit(options.prefix_hit)
    if drafts := drafts_of(options):
        setting = with_draft(replace(setting, speculation=drafts.at(drafts.only)), drafts.draft)
    schedule, assumed = follow(setting, settings, options.engine)
    import_text = setting.kernels.text if setting.kernels else None  # the policy may have another engine
    said = [text for text in setting.assumptions if text != import_text]
    return schedule, setting.on(schedule.policy).profile, (*said, *assumed)


def _of_file(
    options: SimulateOptions, path: Path, settings: EngineSettings
) -> tuple[Schedule, Profile, tuple[str, ...]]:
    """Return a file's schedule, the profile for it, and the assumptions made.

    Raises InputError for options whose values are already in the file.
    """
    names = (
        *("model", "cluster", "workload", "prefix_hit", "dtype", "kv_dtype", "memory_fraction"),
        *("expert_parallel", "attention_dp"),
        *("draft_acceptance", "num_speculative_tokens", "draft_model", "draft_layers"),
    )
    others = {name: getattr(options, name) or None for name in names}
    for name, value in (settings.given | others).items():
        if value is not None:
            typed = " ".join(option_words(name, value))
            raise InputError(f"The schedule file determines {option_name(name)}: leave {typed} or --schedule out.")
    schedule = read_schedule(path)
    share = schedule.workload.prefix_hit
    assumed = (hit_text(share),) if share else ()
    named = only_profile(options.profile)
    stock = named in (None, "roofline") and options.engine is None and options.front_end is None
    roofline = rooflines.found_on(schedule) if stock else None
    if roofline:
        which = f"profile: the roofline that the schedule is based on, {rooflines.engine_text(roofline)}"
        return (
            schedule,
            roofline,
            (*assumed, which, *rooflines.accuracy(roofline, schedule.cluster, schedule.model.spec)),
        )
    where = (schedule.model.spec, schedule.cluster, schedule.dtype)
    engine, front_end = options.engine, options.front_end
    profile, which = find_profile(named, *where, kv_dtype=schedule.kv_dtype, engine=engine, front_end=front_end)
    profile, other = as_found(profile, schedule, engine)
    said = (
        *assumed,
        which,
        *([other] if other else []),
        *([keys] if (keys := other_kv_text(schedule.kv_dtype, profile)) else []),
        *rooflines.accuracy(profile, schedule.cluster, schedule.model.spec),
    )
    return schedule, profile, said


def _steady(schedule: Schedule, profile: Profile, assumptions: tuple[str, ...]) -> Prediction:
    """Predict the steady state of a long run."""
    running, notes = resident(schedule, profile)
    notes = (*notes, *steady_notes(schedule))
    if schedule.prefix_caching and not schedule.workload.prefix_hit:
        notes = (
            *notes,
            "the steady state ignores prefix caching; --replay simulates it, and --prefix-hit assumes a share",
        )
    estimate = xsimulator.estimate(running, profile)
    return Prediction(
        schedule,
        profile,
        (*assumptions, *notes),
        to_dict(estimate),
        ESTIMATE_COLUMNS,
        estimate_rows(estimate, schedule),
        lambda: xsimulator.timeline(schedule, profile),
    )


def _check_longest(schedule: Schedule, longest: int | None) -> None:
    """Raise InputError if the workload has requests that the server refuses."""
    lengths = schedule.workload
    if longest is not None and lengths.input.max + lengths.output.max > longest:
        raise InputError(
            f"Workload {lengths.name} has requests of up to {lengths.input.max + lengths.output.max:,} tokens, but the "
            f"server accepts at most {longest:,}: raise its limit, or use a shorter workload."
        )


_AT_RATE = 20_000
"""Number of requests simulated at a rate, if a workload has no list of them."""


def _requests(schedule: Schedule, options: SimulateOptions, notes: list[str]) -> Workload:
    """Return the requests to simulate: those of a trace, or requests drawn from the workload, at --rate if given."""
    if options.replay:
        named = parse_columns(options.columns) if options.columns else None
        rows, name = tuple(read_trace(options.replay, named, notes.append)), Path(options.replay).name
    else:
        rows, name = schedule.workload.draw(_AT_RATE, options.seed), schedule.workload.name
    if options.rate:
        rate = parse_rate(options.rate)
        rows = with_poisson_arrivals(rows, rate, options.seed)
        notes.append(f"arrivals: Poisson at {figure_text(rate, 6)}/s, {len(rows):,} requests")
    workload = Workload.from_requests(name, rows)
    share = options.prefix_hit
    if not share and not any(row.identity for row in rows):  # the schedule's share holds where the trace says nothing
        share = schedule.workload.prefix_hit
    return with_prefix_hit(workload, share) if options.replay and share else workload


def _replay(schedule: Schedule, profile: Profile, assumptions: tuple[str, ...], options: SimulateOptions) -> Prediction:
    """Simulate the requests one by one, as far as the model's context holds them."""
    notes: list[str] = []
    source, named = options.replay, parse_columns(options.columns) if options.columns else None
    trace = drawn_turns(schedule, options) if options.agents and not source else _requests(schedule, options, notes)
    workload, scaling = fit_context(trace, schedule.model.spec, options.scale_to_context)
    requests, loop = workload.requests or (), options.agents is not None
    labels = read_labels(source, named, sessions=loop) if source else [Labels()] * len(trace.requests or ())
    labels = labels_of(labels, trace.requests or (), requests, schedule.model.spec.longest_request)
    places = list(range(len(requests)))
    if options.shuffle:
        if any(dependencies(labels)):
            _check_dependent(options)
        places = shuffled_places([request.arrival_s for request in requests], options.shuffle, options.seed)
        requests, labels = tuple(requests[place] for place in places), [labels[place] for place in places]
    alike = any(request.identity for request in requests)
    if alike and not schedule.prefix_caching:
        notes.append(f"prompts: {trace.name} says which prompts begin with the same tokens; --prefix-caching uses this")
    start = time.perf_counter()
    run, further = _run(schedule, profile, options, requests, labels)
    wall = time.perf_counter() - start
    since_arrival = latencies(run.served, "arrival")
    times = {key: percentiles(since_arrival[key]) for key in ("ttft", "tpot", "latency")}
    rates = {key: getattr(run.estimate, key) for key in ("throughput_seq_s", "throughput_tok_s")}
    count = len(run.served)
    if count > 1 and not loop and not any(request.arrival_s for request in requests):
        notes.append(f"arrivals: all requests of {trace.name} arrive at the start")
    if schedule.prefix_caching:
        notes.append(_caching_text(run, alike, trace.name))
    if options.out:
        _write_requests(options.out, run, trace.requests or (), places, schedule.model.spec.longest_request)
    requests_s, tokens_s = map(figure_text, rates.values())
    facts = {"requests": count, "seconds": run.seconds, "wall_seconds": wall, **rates, **times}
    facts |= {"preemptions": run.preemptions, "reused_tokens": run.reused, "cached_share": _cached_share(run)}
    facts |= {"kv_blocks": schedule.kv_blocks, "kv_tokens": schedule.kv_blocks * schedule.block_size}
    text = (
        f"{count:,} request{'s' if count > 1 else ''} of {workload.name} in {duration_text(run.seconds)}, simulated in "
        f"{duration_text(wall)}: {requests_s} requests/s, {tokens_s} output tokens/s."
    )
    preempts = options.order_choice.preempt != "none" or schedule.admission == "grow"
    preempted = [f"{counted(run.preemptions, 'preemption')}."] if preempts else []
    return Prediction(
        schedule,
        profile,
        (*assumptions, *notes, *further.notes, *scaling),
        facts | further.facts,
        ("since arrival", *PERCENTILES),
        percentile_rows(times | further.times),
        lambda: run.timeline,
        (text, *further.texts, *preempted, f"KV cache: {cache_text(schedule)}."),
    )


@dataclass(frozen=True)
class _Further:
    """The notes and figures of a replay, apart from its requests' times."""

    notes: tuple[str, ...]
    facts: dict[str, object]
    times: dict[str, dict[str, float | None]]
    """Further rows of the table of times."""
    texts: tuple[str, ...] = ()


def _run(
    schedule: Schedule,
    profile: Profile,
    options: SimulateOptions,
    requests: Sequence[RequestLengths],
    labels: Sequence[Labels],
) -> tuple["Replay", _Further]:
    """Simulate requests: at their arrivals, after others, or in a closed loop."""
    from xsimulator.replay.closed_loop import replay_closed_loop
    from xsimulator.replay.dependent_requests import replay_dependent
    from xsimulator.replay.event_simulator import replay

    choice, hints, notes = options.order_choice, None, tuple[str, ...]()
    if not choice.plain:
        hints = trace_hints(choice, labels, requests, schedule, profile)
        if choice.name == "learned":
            tau = choice.tau or USUAL_TAU
            notes = (f"order: learned, with a simulated ranker whose Kendall's tau is {tau:g}",)
    preemption = choice.preemption(schedule)
    how = choice.make(schedule, profile), hints, preemption
    if options.agents:
        turns = AgentTurns.of(options, requests, labels, options.replay)
        loop = replay_closed_loop(schedule, profile, requests, turns.sessions, *how)
        facts = loop_facts(loop, turns.sessions)
        text = full_load_text(facts)
        times = {"session": facts["sessions"]["completion"]}
        return loop.replay, _Further(
            (*notes, *turns.notes, *turns.pause_notes), {**facts}, times, (text,) if text else ()
        )
    after = dependencies(labels)
    if any(after):
        _check_dependent(options)
        run = replay_dependent(schedule, profile, requests, after, *how)
    else:
        shown = options.timeline is not None
        run = replay(schedule, profile, requests, shown, order=how[0], hints=hints, preemption=preemption)
    runs_s = run_completions(labels, run.served)
    if not runs_s:
        return run, _Further(notes, {}, {})
    completion = percentiles(runs_s)
    return run, _Further(notes, {"runs": {"count": len(runs_s), "completion": completion}}, {"run": completion})


def _cached_share(run: "Replay") -> float:
    """Return the share of the prompts' tokens that were found in the cache when they were first admitted."""
    found, prompts = (sum(getattr(s, key) for s in run.served) for key in ("cached_tokens", "input_tokens"))
    return float(found / prompts)


def _check_dependent(options: SimulateOptions) -> None:
    """Raise InputError for an option that can't be combined with requests that follow others."""
    passed = {"--timeline": options.timeline, "--rate": options.rate, "--shuffle": options.shuffle}
    if name := next((name for name, value in passed.items() if value), None):
        raise InputError(
            f"{name} needs requests with fixed arrivals, but the trace has a column {AFTER}: leave one out."
        )


def _caching_text(run: "Replay", alike: bool, name: str) -> str:
    """Return a sentence on how many tokens were found in the cache."""
    if not alike:
        return (
            f"prefix caching: {name} doesn't say which prompts begin with the same tokens; preempted requests found "
            f"{run.reused:,} of their own tokens in the cache"
        )
    return f"prefix caching: {percent_text(_cached_share(run))} of the prompts' tokens were found in the cache"


def _write_requests(
    path: Path,
    run: "Replay",
    rows: Sequence[RequestLengths],
    places: Sequence[int],
    longest: int | None,
) -> None:
    """Write each request's times, in order of completion; its id is its index among the trace's rows with an output.

    `places` are the places of the replayed requests among the rows that fit.
    """
    whole = len(rows) == len(places)
    ids = [place for place, row in enumerate(rows) if whole or row.fits(longest)]
    lines = []
    for served in run.served:
        facts = {name: getattr(served, name) for name in _SERVED}
        lines.append(document.dumps({"id": ids[places[served.index]], **facts}, indent=None))
    document.write_text(path, "".join(f"{line.rstrip()}\n" for line in lines))


_SERVED = (
    *("arrival_s", "start_s", "first_token_s", "finish_s"),
    *("input_tokens", "output_tokens", "cached_tokens", "preemptions"),
)
"""Keys of a line of `simulate --replay --out`, after the id."""
