"""`exegpt simulate`: the estimate and timeline of a given schedule, or of a running engine's settings."""

from pathlib import Path
from typing import Annotated, Any

import typer

from exegpt.cli import options


def simulate(
    schedule: options.SCHEDULE = None,
    timeline: Annotated[Path | None, typer.Option(help="Write a trace that Perfetto opens.")] = None,
    replay: Annotated[str | None, typer.Option(help="Simulate the requests of this trace one by one.")] = None,
    profile: options.PROFILE = None,
    columns: options.COLUMNS = None,
    json: options.JSON = False,
) -> None:
    """What a schedule will give: throughput, latencies, memory, and what happens when.

    Example: exegpt simulate --schedule schedule.json --timeline trace.json
    """
    from exegpt.cli import inputs, output
    from exegpt.errors import InputError

    output.check_output(timeline)
    if schedule is None:
        raise InputError("--schedule is missing: name a schedule file, as `exegpt tune --out` writes it.")
    given = inputs.read_schedule(schedule)
    found, which = inputs.find_profile(profile, given.model.spec, given.cluster, given.dtype)
    run, facts = (_replay if replay else _steady)(given, found, replay, columns)
    if timeline:
        from exegpt import document
        from exegpt.timeline import chrome_trace

        document.write_text(timeline, document.dumps(chrome_trace([run()]), indent=None))
    if json:
        return output.emit({**facts, "assumptions": [which], "provenance": output.provenance(found)})
    output.note(f"· {which}")
    output.table([given.policy, ""], [[key, _text(value)] for key, value in facts.items() if value not in (None, [])])


def _steady(schedule: Any, profile: Any, *_: Any) -> tuple[Any, dict[str, Any]]:
    import xsimulator
    from exegpt.document import to_dict

    return lambda: xsimulator.timeline(schedule, profile), to_dict(xsimulator.estimate(schedule, profile))


def _replay(schedule: Any, profile: Any, source: str, columns: str | None) -> tuple[Any, dict[str, Any]]:
    import time

    from exegpt.served import latencies, percentiles
    from exegpt.trace import parse_columns, read_trace
    from xsimulator.replay import replay

    requests = read_trace(source, parse_columns(columns) if columns else None)
    start = time.perf_counter()
    done = replay(schedule, profile, requests)
    wall = time.perf_counter() - start
    times = latencies(done.served, "arrival")
    facts = {
        "requests": len(done.served),
        "seconds": done.seconds,
        "wall_seconds": wall,
        "throughput_seq_s": done.estimate.throughput_seq_s,
        "throughput_tok_s": done.estimate.throughput_tok_s,
        **{key: percentiles(times[key]) for key in ("ttft", "tpot", "latency")},
    }
    return lambda: done.timeline, facts


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(v)}" for key, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
