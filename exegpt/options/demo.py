"""The options of `exegpt demo`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from exegpt.options import groups
from xcore.duration import parse_duration


@dataclass(frozen=True, kw_only=True)
class DemoOptions(groups.DeviceOptions, groups.JsonOption):
    """The requests, the bound and the folder of the demo."""

    trace: Annotated[str | None, typer.Option("--trace", help="Use the lengths of this trace.")] = None
    workload: groups.WORKLOAD = None
    latency_bound: Annotated[
        str | None,
        typer.Option(
            "--latency-bound",
            "-l",
            help=groups.LATENCY_BOUND_HELP + " Default: a bound under which the best schedule is also the best one "
            "for these few requests.",
        ),
    ] = None
    num: Annotated[
        int | None, typer.Option("--num", "-n", min=1, help="Number of requests. Default: as many as fit in a minute.")
    ] = None
    directory: Annotated[Path, typer.Option("--dir", help="The folder for all results.")] = Path("exegpt-demo")
    columns: groups.COLUMNS = None
    seed: groups.SEED = 0
    dtype: groups.RUN_DTYPE = None

    @property
    def bounds_s(self) -> tuple[float | None, ...]:
        """Bounds in seconds; empty: a point on the frontier is chosen. None in it: unbounded."""
        return (parse_duration(self.latency_bound),) if self.latency_bound else ()
