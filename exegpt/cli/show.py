"""`exegpt show`: what a schedule, profile or result file says."""

from pathlib import Path
from typing import Annotated, Any

import typer

from exegpt.cli import options
from exegpt.errors import InputError


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
    output.table([kind, ""], [[key, _text(value)] for key, value in facts.items() if value is not None])


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(v)}" for key, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _schedule(file: Path) -> dict[str, Any]:
    from exegpt.cli.inputs import read_schedule
    from exegpt.document import to_dict

    schedule = read_schedule(file)
    facts = to_dict(schedule)
    workload = schedule.workload
    return facts | {
        "model": schedule.model.spec.name,
        "cluster": schedule.cluster.name,
        "workload": f"{workload.name}: input {workload.input.mean:.1f}±{workload.input.std:.1f}, "
        f"output {workload.output.mean:.1f}±{workload.output.std:.1f}, 99th percentile {workload.p99_output} tokens",
        "stages": [f"devices {list(stage.devices)} layers {stage.decoder_layers}" for stage in schedule.stages],
    }


def _profile(file: Path, data: dict[str, Any]) -> dict[str, Any]:
    from exegpt import document
    from exegpt.profile import Profile

    profile = document.from_dict(Profile, data, f"'{file}'")
    decoder = profile.degrees[0].decoder
    tables = {
        "rest": decoder.rest,
        "encode_attention": decoder.encode_attention,
        "chunk_attention": decoder.chunk_attention,
        "decode_attention": decoder.decode_attention,
        "embedding": profile.degrees[0].embedding,
        "head": profile.degrees[0].head,
        "overhead": profile.overhead,
    }
    return {
        "source": profile.source,
        "fingerprint": profile.fingerprint,
        "model": profile.model,
        "dtype": profile.dtype,
        "device": profile.device,
        "degrees": [tables.tp for tables in profile.degrees],
        **{
            name: " × ".join(f"{axis} {p[0]:g}–{p[-1]:g}" for axis, p in zip(table.axes, table.points, strict=True))
            for name, table in tables.items()
        },
        **profile.provenance,
    }


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
