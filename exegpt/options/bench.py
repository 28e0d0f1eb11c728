"""The options of `exegpt bench`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from exegpt.options import groups


@dataclass(frozen=True, kw_only=True)
class BenchOptions(groups.TraceOptions, groups.DeviceOptions, groups.PluginOptions):
    """What is run and compared, and how often."""

    schedule: Annotated[Path, typer.Option("--schedule", "-s", help=groups.SCHEDULE_HELP)]
    model: groups.MODEL_DIRECTORY
    requests: Annotated[str | None, typer.Option("--requests", "-r", help="A JSONL or trace file.")] = None
    workload: groups.WORKLOAD = None
    num: Annotated[
        int | None, typer.Option("--num", "-n", min=1, help="Requests drawn from --workload. Default: 64.")
    ] = None
    profile: groups.PROFILE = None
    policy: Annotated[
        str | None, typer.Option("--policy", help="Also run the best schedules of these policies, or of `all`.")
    ] = None
    peers: Annotated[str | None, typer.Option(help="Also run the requests with these engines: transformers.")] = None
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each schedule; the median run is reported.")] = 3
    rate: groups.RATE = None
    seed: groups.SEED = 0
    report: groups.REPORT = None
