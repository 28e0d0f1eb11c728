"""`exegpt simulate`: the estimate and timeline of a given schedule, or of a running engine's settings."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exegpt.cli import options
from exegpt.duration import duration_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from exegpt.cli.inputs import Setting
    from exegpt.cluster import ClusterSpec
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
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Most resident sequences.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens per iteration (chunked). Default: 2048.")
    ] = None,
    prefills_per_step: Annotated[
        int | None, typer.Option(min=1, help="Prompts per iteration (orca). Default: 1.")
    ] = None,
    tp_degree: Annotated[
        int | None,
        typer.Option(min=1, help="Devices that share every layer, the rest of a replica are stages. Default: 1."),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Copies of the model on equal parts of the cluster. Default: 1.")
    ] = None,
    kv_blocks: Annotated[int | None, typer.Option(min=1, help="Default: what fits into memory.")] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens per KV block. Default: 16.")] = None,
    dtype: options.DTYPE = None,
    columns: options.COLUMNS = None,
    threads: options.THREADS = None,
    json: options.JSON = False,
) -> None:
    """What a schedule, or a running engine's settings, will give: throughput, latencies, memory, what happens when.

    Example: exegpt simulate --schedule schedule.json --timeline trace.json
    """
    from exegpt import document
    from exegpt.cli import inputs, output
    from exegpt.cli.answer import schedule_text
    from exegpt.errors import InputError
    from exegpt.timeline import chrome_trace

    output.check_output(timeline)
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
    }
    if schedule:
        others = {"--model": model, "--cluster": cluster, "--workload": workload, "--dtype": dtype}
        given, found, assumptions = _of_file(schedule, profile, settings | others)
    elif model and max_num_seqs:
        setting = inputs.find_setting(model, cluster, workload or replay, profile, dtype=dtype, columns=columns)
        given, found, assumptions = _of_engine(setting, settings), setting.profile, setting.assumptions
    else:
        raise InputError(
            "Name a schedule file with --schedule, or an engine's settings with --model and --max-num-seqs."
        )
    answer, assumed = _replay(given, found, replay, columns, timeline is not None) if replay else _steady(given, found)
    assumptions += assumed
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
    schedule: Path, profile: str | None, settings: dict[str, Any]
) -> "tuple[Schedule, Profile, tuple[str, ...]]":
    """A file's schedule, the profile for it, and what was assumed; InputError for settings that the file has itself."""
    from exegpt.cli import inputs
    from exegpt.errors import InputError

    for option, value in settings.items():
        if value is not None:
            raise InputError(f"A schedule file says all that {option} does: leave {option} {value} or --schedule out.")
    given = inputs.read_schedule(schedule)
    found, which = inputs.find_profile(profile, given.model.spec, given.cluster, given.dtype)
    return given, found, (which,)


def _of_engine(setting: "Setting", settings: dict[str, Any]) -> "Schedule":
    """The schedule that a running engine with these settings follows; InputError for one of another policy."""
    from exegpt.cli import inputs
    from exegpt.errors import InputError
    from exegpt.schedule import BLOCK_SIZE

    policy = settings["--policy"] or "chunked"
    inputs.check_choice(policy, ("orca", "chunked"), "--policy")
    foreign = {"orca": "--max-num-batched-tokens", "chunked": "--prefills-per-step"}[policy]
    if settings[foreign] is not None:
        raise InputError(f"Policy {policy} has no {foreign}: leave {foreign} {settings[foreign]} out.")
    own = (
        {"max_num_batched_tokens": settings["--max-num-batched-tokens"] or 2048}
        if policy == "chunked"
        else {"prefills_per_step": settings["--prefills-per-step"] or 1}
    )
    return engine_schedule(
        setting,
        policy,
        settings["--tp-degree"] or 1,
        settings["--kv-blocks"],
        settings["--block-size"] or BLOCK_SIZE,
        settings["--replicas"] or 1,
        max_num_seqs=settings["--max-num-seqs"],
        **own,
    )


def engine_schedule(
    setting: "Setting",
    policy: str,
    tp_degree: int,
    kv_blocks: int | None,
    block_size: int,
    replicas: int = 1,
    **own: int,
) -> "Schedule":
    """The schedule that an engine with these settings follows; without `kv_blocks`, as many as memory holds.

    Raises InputError for settings that don't go together.
    """
    from exegpt.errors import InputError
    from exegpt.schedule import BLOCK_SIZE, ModelReference, ProfileReference, Schedule
    from xsimulator.allocation import uniform_stages
    from xsimulator.scenario import Scenario

    model, profile = setting.model, setting.profile
    _check_engine(setting, policy, **own)
    stages = uniform_stages(model, _part(setting.cluster, replicas), tp_degree)
    if kv_blocks is None:
        scenario = Scenario(model, setting.cluster, setting.workload, profile, stages, setting.kv_dtype)
        most = own.get("max_num_batched_tokens") or own["prefills_per_step"] * setting.workload.input.max
        kv_blocks = scenario.room(most) * BLOCK_SIZE // block_size
        if kv_blocks < 1:
            raise InputError(
                f"The weights of '{model.name}' leave no memory for keys and values on {setting.cluster.name}."
            )
    longest = setting.workload.input.max + setting.workload.output.max - 1
    if kv_blocks * block_size < longest:
        raise InputError(
            f"{kv_blocks} KV blocks of {block_size} tokens can't hold the longest request of {longest} tokens: pass "
            f"--kv-blocks {-(-longest // block_size)} at least."
        )
    return Schedule(
        version=Schedule.VERSION,
        policy=policy,  # type: ignore[arg-type]
        model=ModelReference(model, model.fingerprint),
        cluster=setting.cluster,
        workload=setting.workload.laws,
        profile=ProfileReference(profile.source, profile.fingerprint),
        stages=stages,
        kv_blocks=kv_blocks,
        block_size=block_size,
        dtype=profile.dtype,
        kv_dtype=setting.kv_dtype,
        tp_degree=tp_degree,
        replicas=replicas,
        **own,  # type: ignore[arg-type]
    )


def _check_engine(setting: "Setting", policy: str, **own: int) -> None:
    """InputError for settings that no engine follows."""
    from exegpt.errors import InputError

    if policy == "chunked" and setting.model.encoder_layers:
        raise InputError(
            f"An encoder reads its whole input at once, so '{setting.model.name}' can't be served in chunks: pass "
            "--policy orca."
        )
    budget, residents = own.get("max_num_batched_tokens"), own["max_num_seqs"]
    if budget is not None and budget < residents:
        raise InputError(
            f"A budget of {budget} tokens per iteration can't give {residents} sequences a token each: raise "
            "--max-num-batched-tokens or lower --max-num-seqs."
        )


def _part(cluster: "ClusterSpec", replicas: int) -> "ClusterSpec":
    """The part of a cluster that one of its replicas has: a node's share, or whole nodes."""
    from dataclasses import replace

    from exegpt.errors import InputError
    from xsimulator.allocation import replica_sizes

    sizes = replica_sizes(cluster)
    if cluster.devices % replicas or cluster.devices // replicas not in sizes:
        fit = ", ".join(str(cluster.devices // size) for size in reversed(sizes))
        raise InputError(f"{replicas} replicas can't share the devices of {cluster.name} equally: {fit} can.")
    devices, per_node = cluster.devices // replicas, cluster.devices_per_node
    if replicas == 1:
        return cluster
    name = f"the {devices} devices of a replica on {cluster.name}"
    if devices <= per_node:
        return replace(cluster, name=name, nodes=1, devices_per_node=devices)
    return replace(cluster, name=name, nodes=devices // per_node)


def _steady(schedule: "Schedule", profile: "Profile") -> tuple[Answer, tuple[str, ...]]:
    """The steady state that a long run tends to."""
    import xsimulator
    from exegpt.document import to_dict
    from exegpt.report.figures import ESTIMATE_COLUMNS, estimate_rows

    found = xsimulator.estimate(schedule, profile)
    answer = Answer(
        to_dict(found), ESTIMATE_COLUMNS, estimate_rows(found, schedule), lambda: xsimulator.timeline(schedule, profile)
    )
    return answer, _scarce(schedule, profile)


def _scarce(schedule: "Schedule", profile: "Profile") -> tuple[str, ...]:
    """A sentence where the steady state takes more KV blocks than the schedule gives."""
    from exegpt.schedule import BLOCK_SIZE
    from xsimulator.estimates import outcome
    from xsimulator.scenario import Scenario

    scenario = Scenario.of(schedule, profile, None, "exact", True)
    needed = outcome(scenario, schedule.policy, vars(schedule)).demand.blocks * BLOCK_SIZE // schedule.block_size
    if needed <= schedule.kv_blocks:
        return ()
    return (
        f"the steady state fills {needed} KV blocks and the schedule has {schedule.kv_blocks}: requests will wait for "
        "them, which --replay shows",
    )


def _replay(
    schedule: "Schedule", profile: "Profile", source: str, columns: str | None, timeline: bool
) -> tuple[Answer, tuple[str, ...]]:
    """A trace's requests one by one, scaled to the model's context where they don't fit it."""
    import time

    from exegpt.cli.inputs import fit_context
    from exegpt.report.figures import PERCENTILES, percentile_rows, rate_text
    from exegpt.served import latencies, percentiles
    from exegpt.trace import parse_columns, read_trace
    from exegpt.workload import Workload
    from xsimulator.replay import replay

    asked = Workload.from_requests(Path(source).name, read_trace(source, parse_columns(columns) if columns else None))
    workload, scaling = fit_context(asked, schedule.model.spec)
    start = time.perf_counter()
    done = replay(schedule, profile, workload.requests or (), timeline=timeline)
    wall = time.perf_counter() - start
    since_arrival = latencies(done.served, "arrival")
    times = {key: percentiles(since_arrival[key]) for key in ("ttft", "tpot", "latency")}
    rates = {key: getattr(done.estimate, key) for key in ("throughput_seq_s", "throughput_tok_s")}
    facts = {"requests": len(done.served), "seconds": done.seconds, "wall_seconds": wall, **rates, **times}
    told = (
        f"{len(done.served):,} requests in {duration_text(done.seconds)}, simulated in {duration_text(wall)}: "
        f"{rate_text(rates['throughput_seq_s'])} requests/s, {rate_text(rates['throughput_tok_s'])} output tokens/s."
    )
    return Answer(
        facts, ("since arrival", *PERCENTILES), percentile_rows(times), lambda: done.timeline, (told,)
    ), tuple(scaling)
