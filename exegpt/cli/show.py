"""`exegpt show`: what a schedule, profile or result file says."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exegpt.cli import options
from exegpt.errors import InputError

if TYPE_CHECKING:
    from exegpt.estimate import Estimate
    from exegpt.profile import Profile, Table
    from exegpt.schedule import Schedule


def show(
    file: Annotated[Path, typer.Argument(help="A schedule, a profile, or a result file (.jsonl).")],
    json: options.JSON = False,
) -> None:
    """What a schedule, profile or result file says.

    Example: exegpt show schedule.json
    """
    from exegpt import document
    from exegpt.cli import output

    if file.suffix == ".jsonl":
        kind, facts = "results", _results(file)
    else:
        data = document.read_json(file)
        keys = data.keys() if isinstance(data, dict) else ()
        if "policy" in keys:
            kind, facts = "schedule", _schedule(file)
        elif "degrees" in keys:
            kind, facts = "profile", _profile(file, data)
        else:
            raise InputError(f"'{file}' is neither a schedule nor a profile nor a result file.")
    if json:
        return output.emit({"kind": kind, kind: facts, "provenance": output.provenance()})
    rows = [[key, _text(value)] for key, value in facts.items() if value is not None and key not in _TABLES]
    output.table([kind, ""], rows)
    if kind == "schedule":
        _print_stages(file)


_TABLES = ("stages", "utilisation")
"""What is shown as a table of its own."""


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(v)}" for key, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _schedule(file: Path) -> dict[str, Any]:
    from exegpt.cli.inputs import read_schedule
    from exegpt.document import to_dict
    from exegpt.report.stages import stage_utilisation

    schedule = read_schedule(file)
    facts = to_dict(schedule)
    workload, estimate = schedule.workload, _predicted(schedule)
    return facts | {
        "model": schedule.model.spec.name,
        "cluster": schedule.cluster.name,
        "workload": f"{workload.name}: input {workload.input.mean:.1f}±{workload.input.std:.1f}, "
        f"output {workload.output.mean:.1f}±{workload.output.std:.1f}, 99th percentile {workload.p99_output} tokens",
        "arrivals": f"{workload.arrival_rate:.4g}/s" if workload.arrival_rate else None,
        "utilisation": stage_utilisation(schedule, estimate) if estimate else None,
    }


def _predicted(schedule: "Schedule") -> "Estimate | None":
    """The schedule's estimate where the profile that it stands on is at hand: a roofline, or this machine's own."""
    from exegpt.cli.inputs import find_profile
    from xsimulator import estimate

    source = "roofline" if schedule.profile.source == "roofline" else None
    profile, _ = find_profile(source, schedule.model.spec, schedule.cluster, schedule.dtype)
    return estimate(schedule, profile) if profile.fingerprint == schedule.profile.fingerprint else None


def _print_stages(file: Path) -> None:
    from exegpt.cli import output
    from exegpt.cli.inputs import read_schedule
    from exegpt.report.stages import COLUMNS, stage_rows

    schedule = read_schedule(file)
    estimate = _predicted(schedule)
    copies = f", the first of {schedule.replicas} replicas" if schedule.replicas > 1 else ""
    output.table(COLUMNS, stage_rows(schedule, estimate), f"Stages{copies}")
    if estimate is None:
        output.note("· how busy they are isn't told: the profile that the schedule stands on isn't at hand")


def _profile(file: Path, data: dict[str, Any]) -> dict[str, Any]:
    from exegpt import document
    from exegpt.profile import Profile

    profile = document.from_dict(Profile, data, f"'{file}'")
    tables = _tables(profile)
    facts = {
        "source": profile.source,
        "fingerprint": profile.fingerprint,
        "model": profile.model,
        "dtype": profile.dtype,
        "device": profile.device,
        "degrees": [degree.tp for degree in profile.degrees],
        **{name: _grid(table) for name, table in tables.items() if table},
        "missing": _missing(tables) or ["nothing"],
    }
    return profile.provenance | facts


def _tables(profile: "Profile") -> "dict[str, Table | None]":
    """The tables of the first degree and those that all share, by name."""
    first = profile.degrees[0]
    return {
        **vars(first.decoder),
        **{f"encoder_{name}": table for name, table in (vars(first.encoder) if first.encoder else {}).items()},
        "embedding": first.embedding,
        "head": first.head,
        **{name: getattr(profile, name) for name in ("overhead", "send", "send_between_nodes", "host_copy")},
    }


def _grid(table: "Table") -> str:
    """The table's axes, how far they were asked, and how many of its points were not."""
    text = " × ".join(f"{axis} {p[0]:g}–{p[-1]:g}" for axis, p in zip(table.axes, table.points, strict=True))
    return text + (f"; {len(table.filled)} of {len(table.values)} points filled in" if table.filled else "")


_WITHOUT = {
    "mixed_attention": "prompts' attention and decoding's add up",
    "host_copy": "a copy to the host takes as long as a send",
}


def _missing(tables: "dict[str, Table | None]") -> list[str]:
    """What the profile doesn't hold, and what is taken instead."""
    found = [f"{name} ({text})" for name, text in _WITHOUT.items() if not tables[name]]
    nothing = [name for name, table in tables.items() if table and max(table.values) == 0]
    return found + [f"{name} (taken as no time at all)" for name in nothing]


def _results(file: Path) -> dict[str, Any]:
    from collections import Counter

    from exegpt.served import percentiles
    from xrunner.results import read_results

    results = read_results(file)
    done = [r for r in results if r.start_s is not None and r.first_token_s is not None]
    return {
        "requests": len(results),
        "output_tokens": sum(len(r.output_ids) for r in results),
        "finish_reasons": dict(Counter(r.finish_reason for r in results)),
        "seconds": max((r.finish_s for r in results), default=0.0),
        "latency_s": percentiles([r.finish_s - r.start_s for r in done if r.start_s is not None]),
        "ttft_s": percentiles([r.first_token_s - r.arrival_s for r in done if r.first_token_s is not None]),
    }
