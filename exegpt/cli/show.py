"""`exegpt show`: print a schedule, plan, profile, result or cluster file, or a cluster given by name."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exegpt.options.option_record import argument, command, option
from exegpt.options.shared_options import PluginOptions
from xcore.duration import duration_text
from xcore.errors import InputError
from xcore.quantity import figure_text, percent_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from xcore.specs.estimate import Estimate
    from xcore.specs.profile import Profile, Table
    from xcore.specs.schedule import Schedule

    Shown = tuple[dict[str, Any], Callable[[], None]]  # facts for --json, and a function that prints tables


@dataclass(frozen=True, kw_only=True)
class ShowOptions(PluginOptions):
    """The file to print, and the form of the output."""

    file: Path = argument("A schedule, plan, profile or result file (.jsonl), or a cluster's file or name.")
    yaml: bool = option(False, "Print a cluster as the YAML file that --cluster takes.")


@command
def show(options: ShowOptions) -> None:
    """Print a schedule, plan, profile or result file, or the properties of a cluster.

    Example: exegpt show schedule.json

    Example: exegpt show 8xH100-SXM --yaml > mine.yaml
    """
    from xcore.console import output

    file, kind = options.file, _kind(options.file)
    if options.yaml:
        if kind != "cluster":
            raise InputError(f"'{file}' is a {kind}, not a cluster: leave --yaml out.")
        return print(_cluster_yaml(file), end="")
    shown = {"results": _results, "schedule": _schedule, "plan": _plan, "stages": _stages, "profile": _profile}
    shown |= {"cluster": _cluster}
    facts, print_them = shown[kind](file)
    if options.json:
        return output.emit({"kind": kind, kind: facts, "provenance": output.provenance()})
    print_them()


def _kind(file: Path) -> str:
    """Return the kind of a file; InputError for an unknown one."""
    from xcore import document
    from xcore.specs.cluster import is_cluster_file

    if file.suffix.lower() == ".jsonl":
        return "results"
    if is_cluster_file(file.name) or (not file.exists() and not file.suffix):
        return "cluster"
    if kind := document.kind_of(document.read_json(file)):
        return "stages" if kind == "StagePlan" else document.kind_text(kind)
    raise InputError(f"'{file}' is not a schedule, plan, profile or result file: name one of these.")


def _cluster_yaml(file: Path) -> str:
    """Return a cluster as a YAML file with all of its fields, for editing."""
    import yaml

    from xcore.document import to_dict
    from xcore.specs.cluster import parse_cluster

    facts = to_dict(parse_cluster(str(file)))
    del facts["name"]  # the file's name is the cluster's
    head = "# A cluster for --cluster FILE. Bytes, seconds and FLOP/s; docs/devices.md describes each field.\n"
    text: str = yaml.safe_dump(facts, sort_keys=False)
    return head + text


def _cluster(file: Path) -> "Shown":
    from xcore.console import output
    from xcore.document import to_dict
    from xcore.specs.cluster import is_stock, parse_cluster
    from xcore.specs.device_sheets import SHEETS

    cluster = parse_cluster(str(file))
    device, links = cluster.device, {"link in a node": cluster.intra, "link between nodes": cluster.inter}
    rates = {dtype: f"{figure_text(rate / 1e12)} TFLOP/s" for dtype, rate in device.flops_s.items()}
    memory, shown = (figure_text(size / 2**30, 4) for size in (device.memory_bytes, device.shown_bytes))
    share = percent_text(cluster.memory_fraction)
    rows = {
        "nodes": f"{cluster.nodes:,} of {cluster.devices_per_node:,} {device.kind}",
        "memory": f"{memory} GiB per device, of which software sees {shown}; usable: {share}, or the engine's share",
        "memory bandwidth": f"{figure_text(device.bandwidth_bytes_s / 1e9)} GB/s",
        **{f"dense {dtype}": text for dtype, text in rates.items()},
        **{
            name: f"{figure_text(link.bandwidth_bytes_s / 1e9)} GB/s, {duration_text(link.latency_s)} of latency"
            for name, link in links.items()
        },
        **{
            f"ring of {devices}": f"{figure_text(rate / 1e9)} GB/s per device"
            for devices, rate in cluster.intra.ring_bytes_s
        },
        **({"not compared": "; ".join(SHEETS[device.kind].not_compared) or "–"} if is_stock(cluster) else {}),
    }
    return to_dict(cluster), lambda: output.table(("cluster", ""), [[*row] for row in rows.items()], cluster.name)


def _plan(file: Path) -> "Shown":
    from exegpt.cli.plan_tables import print_plan
    from xcore import document
    from xcore.specs.cluster_plan import Plan

    plan = document.read(Plan, file)
    return document.to_dict(plan), lambda: print_plan(plan)


def _stages(file: Path) -> "Shown":
    from exegpt.cli.plan_tables import print_plan
    from xcore import document
    from xmulti.files.stage_plan import StagePlan

    plan = document.read(StagePlan, file)
    return document.to_dict(plan), lambda: print_plan(plan)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(v)}" for key, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?e[+-]\d+", value):
        return figure_text(float(value))  # all of provenance is text, including numbers
    return figure_text(value) if isinstance(value, float) else str(value)


def _schedule(file: Path) -> "Shown":
    from exegpt.report.stage_table import stage_utilisation
    from xcore.document import to_dict
    from xcore.files import read_schedule

    schedule = read_schedule(file)
    workload, estimate = schedule.workload, _predicted(schedule)
    facts = to_dict(schedule) | {
        "model": schedule.model.spec.name,
        "cluster": schedule.cluster.name,
        "workload": f"{workload.name}: input {figure_text(workload.input.mean, 4)}±{figure_text(workload.input.std)}, "
        f"output {figure_text(workload.output.mean, 4)}±{figure_text(workload.output.std)}, 99th percentile "
        f"{workload.p99_output:,} tokens"
        + (f", {percent_text(workload.prefix_hit)} of the prompts cached" if workload.prefix_hit else ""),
        "arrivals": f"{figure_text(workload.arrival_rate, 4)}/s" if workload.arrival_rate else None,
        "utilisation": stage_utilisation(schedule, estimate) if estimate else None,
    }
    return facts, lambda: _print_schedule(schedule, facts, estimate)


def _print_schedule(schedule: "Schedule", facts: dict[str, Any], estimate: "Estimate | None") -> None:
    from exegpt.report.figures import ESTIMATE_COLUMNS, estimate_rows, steady_notes
    from exegpt.report.stage_table import COLUMNS, stage_rows
    from xcore.console import output
    from xcore.console.schedule_text import bound_text, schedule_text

    rows = {
        "model": f"{facts['model']} in {schedule.dtype}, keys and values in {schedule.kv_dtype}",
        "cluster": facts["cluster"],
        "workload": facts["workload"],
        "arrivals": facts["arrivals"],
        "bound": bound_text(schedule),
        "KV cache": f"{schedule.kv_blocks:,} blocks of {schedule.block_size} tokens, on each stage",
        "profile": f"{schedule.profile.source} ({schedule.profile.fingerprint})",
    }
    output.table(("schedule", ""), [[name, text] for name, text in rows.items() if text], schedule_text(schedule))
    copies = f", the first of {schedule.replicas} replicas" if schedule.replicas > 1 else ""
    output.table(COLUMNS, stage_rows(schedule, estimate), f"Stages{copies}")
    if estimate is None:
        return output.note("· no prediction: the profile that the schedule is based on isn't available here")
    output.notes(steady_notes(schedule))
    output.table(ESTIMATE_COLUMNS, estimate_rows(estimate, schedule))


def _predicted(schedule: "Schedule") -> "Estimate | None":
    """Return the schedule's estimate if its profile is available: a roofline, or a profile of this machine."""
    from xprofiler.profiles import find_profile
    from xprofiler.rooflines import found_on
    from xscheduler.settings import for_schedule
    from xsimulator import estimate

    if schedule.profile.source == "roofline":
        profile = found_on(schedule)
        return estimate(schedule, for_schedule(profile, schedule)) if profile else None
    profile, _ = find_profile(None, schedule.model.spec, schedule.cluster, schedule.dtype, kv_dtype=schedule.kv_dtype)
    if profile.fingerprint != schedule.profile.fingerprint:
        return None
    return estimate(schedule, for_schedule(profile, schedule))


def _profile(file: Path) -> "Shown":
    from xcore import document
    from xcore.console import output
    from xcore.specs.profile import Profile

    profile = document.read(Profile, file)
    tables = _tables(profile)
    facts = profile.provenance | {
        "source": profile.source,
        "fingerprint": profile.fingerprint,
        "model": profile.model,
        "dtype": profile.dtype,
        "device": profile.device,
        "degrees": [degree.tp for degree in profile.degrees],
        **({"merged_blocks": f"{profile.merged_blocks:.3f} times"} if profile.merged_blocks else {}),
        **{name: _grid(table) for name, table in tables.items() if table},
        "missing": _missing(tables) or ["nothing"],
    }
    name = profile.provenance.get("model")  # the model's name, if the source has it
    shown = facts | ({"model": f"{name} ({profile.model})"} if name else {})
    rows = [[key, _text(value)] for key, value in shown.items() if value is not None]
    return facts, lambda: output.table(("profile", ""), rows)


def _tables(profile: "Profile") -> "dict[str, Table | None]":
    """Return the tables by name: those of the first tensor-parallel degree, and those common to all degrees."""
    first = profile.degrees[0]
    return {
        **vars(first.decoder),
        **{f"encoder_{name}": table for name, table in (vars(first.encoder) if first.encoder else {}).items()},
        "embedding": first.embedding,
        "head": first.head,
        **{name: getattr(profile, name) for name in ("overhead", "send", "send_between_nodes", "host_copy", "switch")},
    }


def _grid(table: "Table") -> str:
    """Return the table's axes with their ranges, and the number of points that were not measured."""
    text = " × ".join(
        f"{axis} {figure_text(p[0])}–{figure_text(p[-1])}" for axis, p in zip(table.axes, table.points, strict=True)
    )
    return text + (f"; {len(table.filled)} of {len(table.values)} points not measured" if table.filled else "")


_WITHOUT = {
    "mixed_attention": "the attention times of prefill and of decoding are added",
    "host_copy": "a copy to the host takes as long as a send",
    "switch": "a switch of model on a shared device takes no time",
}


def _missing(tables: "dict[str, Table | None]") -> list[str]:
    """Return the tables that the profile lacks, and the assumptions made instead."""
    missing = [f"{name} ({text})" for name, text in _WITHOUT.items() if not tables[name]]
    nothing = [name for name, table in tables.items() if table and max(table.values) == 0]
    return missing + [f"{name} (taken as zero)" for name in nothing]


def _results(file: Path) -> "Shown":
    from collections import Counter

    from xcore.specs.request_times import percentiles
    from xrunner.core.results import read_results

    results = read_results(file)
    since = "arrival" if any(r.arrival_s > 0 for r in results) else "start"  # as in an estimate
    begun = [(r, r.arrival_s if since == "arrival" else r.start_s) for r in results]
    done = [(r, begin, r.first_token_s) for r, begin in begun if begin is not None and r.first_token_s is not None]
    facts = {
        "requests": len(results),
        "output_tokens": sum(len(r.output_ids) for r in results),
        "finish_reasons": dict(Counter(r.finish_reason for r in results)),
        "seconds": max((r.finish_s for r in results), default=0.0),
        "latency_from": since,
        "latency_s": percentiles([r.finish_s - begin for r, begin, _ in done]),
        "ttft_s": percentiles([first - begin for _, begin, first in done]),
    }
    return facts, lambda: _print_results(facts)


def _print_results(facts: dict[str, Any]) -> None:
    from exegpt.report.figures import PERCENTILES, percentile_rows
    from xcore.console import output

    tokens, seconds = facts["output_tokens"], facts["seconds"]
    rate = f", {figure_text(tokens / seconds)} output tokens/s" if seconds else ""
    title = (
        f"{facts['requests']:,} requests (finish reasons: {_text(facts['finish_reasons'])}), {tokens:,} output tokens"
    )
    times = {"ttft": facts["ttft_s"], "latency": facts["latency_s"]}
    since = f"since {facts['latency_from']}"
    output.table((since, *PERCENTILES), percentile_rows(times), f"{title} in {duration_text(seconds)}{rate}")
