"""`exegpt simulate`: the estimate and timeline of a given schedule, or of a running engine's settings."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exegpt.cli import options
from exegpt.duration import duration_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from exegpt.profile import Profile
    from exegpt.schedule import Schedule
    from exegpt.timeline import Timeline


def simulate(
    schedule: options.SCHEDULE = None,
    timeline: Annotated[Path | None, typer.Option(help="Write a trace that Perfetto opens.")] = None,
    replay: Annotated[str | None, typer.Option(help="Simulate the requests of this trace one by one.")] = None,
    profile: options.PROFILE = None,
    policy: Annotated[str | None, typer.Option(help="An engine's: orca or chunked. Default: chunked.")] = None,
    model: options.MODEL = None,
    cluster: options.CLUSTER = None,
    workload: options.WORKLOAD = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Most resident sequences. Default: vLLM's.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens per iteration (chunked). Default: 2048.")
    ] = None,
    prefills_per_step: Annotated[
        int | None, typer.Option(min=1, help="Prompts per iteration (orca). Default: 1.")
    ] = None,
    tp_degree: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Devices that share every layer; the others of a replica are stages. Default: the widest.",
        ),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Copies of the model on equal parts of the cluster. Default: 1.")
    ] = None,
    kv_blocks: Annotated[int | None, typer.Option(min=1, help="On each stage. Default: what fits into memory.")] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens per KV block. Default: 16.")] = None,
    admission: options.ADMISSION = None,
    prefix_caching: options.PREFIX_CACHING = False,
    dtype: options.DTYPE = None,
    engine: options.ENGINE = None,
    columns: options.COLUMNS = None,
    threads: options.THREADS = None,
    json: options.JSON = False,
) -> None:
    """What a schedule, or a running engine's settings, will give: throughput, latencies, memory, what happens when.

    Example: exegpt simulate --schedule schedule.json --timeline trace.json
    """
    from exegpt import document
    from exegpt.cli import inputs, output
    from exegpt.cli.engine import follow
    from exegpt.errors import InputError
    from exegpt.report.schedule_text import schedule_text
    from exegpt.timeline import chrome_trace

    output.check_output(timeline)
    output.check_distinct((timeline,), (schedule, workload, profile, replay, cluster))
    inputs.set_threads(threads)
    inputs.check_columns(columns, workload, replay)
    settings = {
        "--policy": policy,
        "--max-num-seqs": max_num_seqs,
        "--max-num-batched-tokens": max_num_batched_tokens,
        "--prefills-per-step": prefills_per_step,
        "--tp-degree": tp_degree,
        "--replicas": replicas,
        "--kv-blocks": kv_blocks,
        "--block-size": block_size,
        "--admission": admission,
        "--prefix-caching": prefix_caching or None,
    }
    if schedule:
        others = {"--model": model, "--cluster": cluster, "--workload": workload, "--dtype": dtype}
        given, found, assumptions = _of_file(schedule, profile, engine, settings | others)
    elif model:
        setting = inputs.find_setting(
            model,
            cluster,
            workload or replay,
            profile,
            dtype=dtype,
            columns=columns,
            engine=engine,
            one_by_one=bool(replay),
        )
        given, assumed = follow(setting, settings)
        found, assumptions = setting.profile, (*setting.assumptions, *assumed)
    else:
        raise InputError(
            "Name a schedule file with --schedule, or an engine's settings with --model, --cluster and --max-num-seqs."
        )
    answer, assumed = _replay(given, found, replay, columns, timeline is not None) if replay else _steady(given, found)
    assumptions = tuple(dict.fromkeys((*assumptions, *assumed)))
    if timeline:
        document.write_text(timeline, document.dumps(chrome_trace([answer.timeline()]), indent=None))
    if json:
        return output.emit({**answer.facts, "assumptions": list(assumptions), "provenance": output.provenance(found)})
    for text in assumptions:
        output.note(f"· {text}")
    output.table(answer.columns, answer.rows, schedule_text(given))
    for text in answer.texts:
        print(text)


@dataclass(frozen=True)
class Answer:
    """What was simulated."""

    facts: dict[str, Any]
    """For scripts."""
    columns: "Sequence[str]"
    rows: "Sequence[Sequence[str]]"
    """For people."""
    timeline: "Callable[[], Timeline]"
    texts: tuple[str, ...] = ()
    """What doesn't fit a table."""


def _of_file(
    schedule: Path, profile: str | None, engine: str | None, settings: dict[str, Any]
) -> "tuple[Schedule, Profile, tuple[str, ...]]":
    """A file's schedule, the profile for it, and what was assumed; InputError for settings that the file has itself."""
    from exegpt.cli import inputs, stock
    from exegpt.errors import InputError

    for option, value in settings.items():
        if value is not None:
            typed = option if value is True else f"{option} {value}"
            raise InputError(f"A schedule file says all that {option} does: leave {typed} or --schedule out.")
    given = inputs.read_schedule(schedule)
    own = stock.found_on(given) if profile in (None, "roofline") and engine is None else None
    if own:
        return given, own, (f"profile: the roofline that it was found on, {stock.told(own)}", *stock.accuracy(own))
    where = (given.model.spec, given.cluster, given.dtype)
    found, which = inputs.find_profile(profile, *where, kv_dtype=given.kv_dtype, engine=engine)
    return given, found, (which, *_another(given, found), *stock.accuracy(found))


def _another(schedule: "Schedule", profile: "Profile") -> tuple[str, ...]:
    """A sentence where a schedule was found on another profile than the one at hand."""
    if profile.fingerprint == schedule.profile.fingerprint:
        return ()
    own = f"{schedule.profile.source} ({schedule.profile.fingerprint})"
    return (f"the schedule was found on another profile, {own}, which --profile FILE takes: figures will differ",)


def _steady(schedule: "Schedule", profile: "Profile") -> tuple[Answer, tuple[str, ...]]:
    """The steady state that a long run tends to."""
    import xsimulator
    from exegpt.cli.engine import resident
    from exegpt.document import to_dict
    from exegpt.report.figures import ESTIMATE_COLUMNS, estimate_rows

    runs, notes = resident(schedule, profile)
    if schedule.prefix_caching:
        notes = (*notes, "the steady state reckons without prefix caching: --replay follows it")
    found = xsimulator.estimate(runs, profile)
    answer = Answer(
        to_dict(found), ESTIMATE_COLUMNS, estimate_rows(found, schedule), lambda: xsimulator.timeline(schedule, profile)
    )
    return answer, notes


def _replay(
    schedule: "Schedule", profile: "Profile", source: str, columns: str | None, timeline: bool
) -> tuple[Answer, tuple[str, ...]]:
    """A trace's requests one by one, scaled to the model's context where they don't fit it."""
    import time

    from exegpt.cli.inputs import fit_context
    from exegpt.columns import parse_columns
    from exegpt.quantity import figure_text
    from exegpt.report.figures import PERCENTILES, percentile_rows
    from exegpt.served import latencies, percentiles
    from exegpt.trace import read_trace
    from exegpt.workload import Workload
    from xsimulator.replay.event_simulator import replay

    notes: list[str] = []
    named = parse_columns(columns) if columns else None
    asked = Workload.from_requests(Path(source).name, read_trace(source, named, notes.append))
    workload, scaling = fit_context(asked, schedule.model.spec)
    start = time.perf_counter()
    done = replay(schedule, profile, workload.requests or (), timeline=timeline)
    wall = time.perf_counter() - start
    since_arrival = latencies(done.served, "arrival")
    times = {key: percentiles(since_arrival[key]) for key in ("ttft", "tpot", "latency")}
    rates = {key: getattr(done.estimate, key) for key in ("throughput_seq_s", "throughput_tok_s")}
    facts = {"requests": len(done.served), "seconds": done.seconds, "wall_seconds": wall, **rates, **times}
    facts |= {"preemptions": done.preemptions, "reused_tokens": done.reused}
    served = [figure_text(rate) for rate in rates.values()]
    if len(done.served) > 1 and not any(request.arrival_s for request in workload.requests or ()):
        notes.append(f"arrivals: all requests of {asked.name} are there at the start, and their times count from then")
    if schedule.prefix_caching:
        notes.append(
            "prefix caching: a trace has no tokens, so no two of its prompts begin alike; preempted requests found "
            f"{done.reused:,} of their own tokens in the cache"
        )
    told = (
        f"{len(done.served):,} request{'s' if len(done.served) > 1 else ''} of {workload.name} in "
        f"{duration_text(done.seconds)}, simulated in {duration_text(wall)}: "
        f"{served[0]} requests/s, {served[1]} output tokens/s."
    )
    return Answer(facts, ("since arrival", *PERCENTILES), percentile_rows(times), lambda: done.timeline, (told,)), (
        *notes,
        *scaling,
    )
