"""`exegpt bench`: predicted against measured, policy by policy, on the same requests."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exegpt.cli import options

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from exegpt.cli.inputs import Setting
    from exegpt.report.comparison import Comparison
    from exegpt.request import Request
    from exegpt.schedule import Schedule
    from xrunner.comm.ranks import Ranks

DRAWN = 64
"""Requests that are drawn where nothing says how many."""


def bench(
    schedule: options.REQUIRED_SCHEDULE,
    model: options.MODEL_DIRECTORY,
    requests: Annotated[str | None, typer.Option("--requests", "-r", help="A JSONL or trace file.")] = None,
    workload: options.WORKLOAD = None,
    num: Annotated[
        int | None, typer.Option("--num", "-n", min=1, help=f"Requests drawn from --workload. Default: {DRAWN}.")
    ] = None,
    profile: options.PROFILE = None,
    policy: Annotated[
        str | None, typer.Option("--policy", help="Run these policies' best schedules too, or `all`.")
    ] = None,
    peers: Annotated[str | None, typer.Option(help="Serve them with these, too: transformers.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each; the median one is reported.")] = 3,
    columns: options.COLUMNS = None,
    rate: options.RATE = None,
    seed: options.SEED = 0,
    device: options.DEVICE = None,
    attention: options.ATTENTION = None,
    threads: options.THREADS = None,
    report: options.REPORT = None,
    json: options.JSON = False,
) -> None:
    """Run requests under a schedule, and under other policies' best ones, beside what was predicted for them.

    Peers serve the same requests unbounded, on the same device: --peers transformers is its `generate` in static
    batches and its continuous batching.

    Example: exegpt bench --schedule schedule.json --model my-model --workload T --num 64

    Example: mpirun -n 2 exegpt bench --schedule two-ranks.json --model my-model --profile ranks.json --policy waa-c
    """
    from exegpt.cli import inputs, output
    from exegpt.cli.execute import write_report
    from exegpt.models.device import find_device
    from exegpt.models.planning import choose_attention, described
    from exegpt.request import Request
    from exegpt.schedule import Schedule
    from xrunner.comm.ranks import job

    def ask() -> tuple[Any, ...]:
        directory, given, named = inputs.model_directory(model), inputs.read_schedule(schedule), peer_names(peers)
        output.check_output(report)
        output.check_distinct((report,), (requests, schedule, profile, workload))
        wanted, notes = _requests(given, directory, requests, workload, num, columns, rate, seed)
        chosen, why = choose_attention(attention, given.model.spec, given.dtype, there)
        setting = _setting(directory, given, profile, ranks.size, kind, chosen)
        schedules = (given, *other_schedules(setting, given, policy))
        return schedules, setting, tuple(wanted), (*notes, *why), named, chosen

    with job() as ranks:
        ranks.agree(lambda: {"schedule": str(schedule), "policy": str(policy), "repeats": str(repeats)})
        kind = ranks.agree(lambda: {"device": find_device(device, ranks.local).type})["device"]
        there = find_device(kind, ranks.local)
        asked = _Asked(Path(model), *ranks.share(ask, inputs.Setting, Schedule, Request))
        ranks.agree(lambda: {"threads": str(ranks.threads(threads))})
        inputs.set_threads(ranks.threads(threads))
        setting, wanted, notes = asked.setting, asked.requests, asked.notes
        done = compare_policies(
            asked.directory, asked.schedules, setting, wanted, repeats, ranks, there, asked.attention
        )
    if ranks.rank:
        return
    others = [row for name in asked.peers for row in serve_with(name, asked.directory, wanted, done, repeats, there)]
    if report:
        write_report(report, f"{setting.model.name}: predicted beside measured", setting, done)
    if json:
        return output.emit(
            {
                "policies": [{"policy": c.schedule.policy, **c.document()} for c in done],
                "peers": others,
                "assumptions": [*setting.assumptions, *notes],
                "provenance": output.provenance(setting.profile, seed, attention=described(asked.attention, there)),
            }
        )
    for text in (*setting.assumptions, *notes):
        output.note(f"· {text}")
    _print(done, others)
    print(f"{len(wanted)} requests, the median of {repeats} runs each.")


def _print(done: "Sequence[Comparison]", others: "Sequence[dict[str, Any]]") -> None:
    """Ours, predicted beside measured, and the peers."""
    from exegpt.cli import output
    from exegpt.cli.execute import COMPARISON_COLUMNS, comparison_rows

    output.table(COMPARISON_COLUMNS, comparison_rows(done))
    if others:
        rows = [
            [
                row["peer"],
                row["setting"],
                output.number(row["tokens_s"]),
                output.seconds(row["latency_s"]),
                f"{row['ratio']:.2f}",
                f"{row['alike']:.1%}",
            ]
            for row in others
        ]
        over = f"{done[0].schedule.policy} over it"
        output.table(["peer", "setting", "tok/s", "latency of the bound", over, "tokens alike"], rows)


@dataclass(frozen=True)
class _Asked:
    """What is to be compared, on every rank."""

    directory: Path
    schedules: "tuple[Schedule, ...]"
    setting: "Setting"
    requests: "tuple[Request, ...]"
    notes: tuple[str, ...]
    peers: tuple[str, ...]
    attention: str
    """As in `Model`."""


def _setting(
    directory: Path, given: "Schedule", profile: str | None, ranks: int, device: str, attention: str
) -> "Setting":
    """The setting on this machine's device, or of several ranks on the schedule's own cluster."""
    from exegpt.cli import inputs

    if ranks == 1:
        how = {"dtype": given.dtype, "device": device, "attention": attention}
        return inputs.find_setting(str(directory), "local", given.workload, profile, **how)
    where = given.model.spec, given.cluster, given.dtype
    found, which = inputs.find_profile(profile, *where, attention=attention)
    return inputs.Setting(given.model.spec, given.cluster, given.workload, found, given.kv_dtype, (which,))


def peer_names(text: str | None) -> tuple[str, ...]:
    """The peers in a comma-separated list; InputError for one that isn't known or installed."""
    import importlib.util

    from exegpt.cli import inputs
    from exegpt.errors import InputError

    names = tuple(dict.fromkeys(name.strip() for name in text.split(","))) if text else ()
    for name in names:
        inputs.check_choice(name, ("transformers",), "Peer")
        if importlib.util.find_spec(name) is None:
            raise InputError(f"Peer '{name}' is not installed: pip install {name}.")
    return names


def serve_with(
    name: str,
    directory: Path,
    requests: "Sequence[Request]",
    done: "list[Comparison]",
    repeats: int,
    device: "torch.device",
) -> list[dict[str, Any]]:
    """What a peer does with the same weights and requests, the median of as many runs: its useful output tokens per
    second, the bound's latency, how many times its tokens the first schedule gave, and the share of them that is the
    same.
    """
    from exegpt.cli import output, peers
    from exegpt.served import summarise

    first = done[0]
    ours = {result.id: list(result.output_ids) for result in first.results}
    tokens = sum(map(len, ours.values()))
    model, rows = peers.load(directory, first.schedule.dtype, device), []
    for way, serve in peers.WAYS.items():
        output.note(f"{name}: {way} …")
        runs = sorted((serve(model, requests) for _ in range(repeats)), key=lambda run: run.seconds)
        middle = runs[(repeats - 1) // 2]
        outputs = {request.id: made for request, made in zip(requests, middle.outputs, strict=True)}
        same = sum(a == b for key, own in ours.items() for a, b in zip(own, outputs[key], strict=False))
        measured = summarise(middle.served, middle.seconds, first.schedule.bound)
        rows.append(
            {
                "peer": name,
                "setting": way,
                "tokens_s": middle.tokens_s,
                "latency_s": measured.latency_s,
                "ratio": first.measured.throughput_tok_s / middle.tokens_s,
                "alike": same / tokens,
            }
        )
    return rows


def _requests(
    given: "Schedule",
    directory: Path,
    source: str | None,
    workload: str | None,
    num: int | None,
    columns: str | None,
    rate: str | None,
    seed: int,
) -> "tuple[list[Request], list[str]]":
    """The requests of a file, or `num` drawn from a workload's lengths (the schedule's), and what was assumed."""
    from exegpt.cli import inputs
    from exegpt.cli.run import load_tokenizer
    from exegpt.columns import parse_columns
    from exegpt.errors import InputError
    from exegpt.model import ModelSpec
    from exegpt.trace import parse_rate, parse_workload, with_poisson_arrivals
    from xrunner.core.requests import random_requests, read_requests

    spec = ModelSpec.from_directory(directory)
    given.check_model(spec)
    named = parse_columns(columns) if columns else None
    inputs.check_columns(columns, source, workload)
    for option, value in (("--workload", workload), ("--num", num), ("--rate", rate)):
        if source and value:
            raise InputError(f"The requests are those of '{source}': leave {option} {value} or --requests out.")
    if source:
        tokenizer = load_tokenizer(directory)
        encode = (lambda text: tokenizer.encode(text).ids) if tokenizer else None
        notes: list[str] = []
        return read_requests(source, spec, encode, seed=seed, columns=named, note=notes.append)[0], notes
    notes = []
    load = parse_workload(workload, named, note=notes.append) if workload else given.workload
    load, scaling = inputs.fit_context(load, spec)
    num = num or DRAWN
    lengths = draw(load, num, seed, spec.context)
    if rate:
        lengths = with_poisson_arrivals(lengths, parse_rate(rate), seed)
    return random_requests(lengths, spec.vocab, seed), [f"{num} requests of workload {load.name}", *notes, *scaling]


def draw(workload: Any, num: int, seed: int, context: int) -> Any:
    """`num` lengths of a workload, all there from the start."""
    from dataclasses import replace

    return tuple(replace(row, arrival_s=0.0) for row in workload.draw(num, seed, context))


def other_schedules(setting: "Setting", given: "Schedule", policy: str | None) -> "list[Schedule]":
    """The best schedules of the asked policies (`all`: of every other one) under the given schedule's bound."""
    import math

    from exegpt.cli import inputs
    from exegpt.cli.answer import search_schedule

    if policy is None:
        return []
    names = [n for n in inputs.policy_names(None if policy == "all" else policy) if n != given.policy]
    if not names:
        return []
    bound_s = math.inf if given.latency_bound_s is None else given.latency_bound_s
    answer = search_schedule(setting, bound_s, bound=given.bound, policies=tuple(names))
    return [a.schedule for a in answer.alternatives if a.schedule]


def compare_policies(
    directory: Path,
    schedules: "Sequence[Schedule]",
    setting: "Setting",
    requests: "Sequence[Request]",
    repeats: int,
    ranks: "Ranks",
    device: "torch.device",
    attention: str = "triton",
) -> "list[Comparison]":
    """Each schedule's median run, on rank 0 alone; the runs take turns, so that a slow moment doesn't fall on one
    schedule alone.
    """
    from exegpt.cli import output
    from exegpt.cli.execute import compare, least, slowdown_now
    from exegpt.report.comparison import median
    from xrunner.core.engine import Engine
    from xrunner.core.report import RunReport

    runs: list[list[Comparison]] = [[] for _ in schedules]
    total = len(schedules) * repeats * len(requests)
    with output.progress("running requests") as progress:
        finished = 0

        def on_finish(_: Any) -> None:
            nonlocal finished
            finished += 1
            progress(finished, total)

        for _ in range(repeats):
            for mine, schedule in zip(runs, schedules, strict=True):
                engine = Engine.load(directory, schedule, ranks, device=device, attention=attention)
                before = slowdown_now(setting.profile, engine.model, ranks)
                report = engine.run(requests, on_finish)
                slowdown = least(before, slowdown_now(setting.profile, engine.model, ranks))
                told = ranks.gather(report if engine.leads else None, 0, RunReport)
                mine += [compare(schedule, setting.profile, one, slowdown=slowdown) for one in told if one]
                engine.close()
    return [median(mine) for mine in runs if mine]
