"""`exegpt engine`: the engine of a server, which `exegpt serve` starts. Not for people."""

from pathlib import Path
from typing import Annotated

import typer

from exegpt.cli import options


def engine(
    model: Annotated[str, typer.Option("--model", "-m")],
    socket: Annotated[Path, typer.Option("--socket", help="Where the frontend listens.")],
    schedule: Annotated[Path | None, typer.Option("--schedule", "-s")] = None,
    workload: options.WORKLOAD = None,
    latency_bound: Annotated[str | None, typer.Option("--latency-bound", "-l")] = None,
    policy: options.POLICY = None,
    admission: options.ADMISSION = None,
    device: options.DEVICE = None,
    attention: options.ATTENTION = None,
    dtype: options.RUN_DTYPE = None,
    threads: options.THREADS = None,
) -> None:
    """Run the requests that come over a socket."""
    from exegpt.app import serving_engine
    from exegpt.app.choices import policy_names
    from exegpt.duration import parse_duration
    from xrunner.comm.ranks import job

    asked = serving_engine.EngineOptions(
        model=model,
        socket=socket,
        schedule=schedule,
        workload=workload,
        latency_bound_s=parse_duration(latency_bound) if latency_bound else None,
        policies=policy_names(policy) if policy else None,
        admission=admission or "grow",
        device=device,
        attention=attention,
        dtype=dtype,
        threads=threads,
    )
    with job() as ranks:
        serving_engine.serve(asked, ranks)
