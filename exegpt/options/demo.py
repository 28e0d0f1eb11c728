"""The options of `exegpt demo`."""

from dataclasses import dataclass
from pathlib import Path

from exegpt.options import groups
from exegpt.options.record import option
from xcore.duration import parse_duration


@dataclass(frozen=True, kw_only=True)
class DemoOptions(groups.DeviceOptions, groups.JsonOption):
    """The requests, the bound and the folder of the demo."""

    trace: str | None = option(None, "Use the lengths of this trace.")
    workload: str | None = groups.WORKLOAD
    latency_bound: str | None = option(
        None,
        groups.LATENCY_BOUND_HELP + " Default: a bound under which the best schedule is also the best one "
        "for these few requests.",
        "-l",
    )
    num: int | None = option(None, "Number of requests. Default: as many as fit in a minute.", "-n", min=1)
    directory: Path = option(Path("exegpt-demo"), "The folder for all results.", "--dir")
    columns: str | None = groups.COLUMNS
    seed: int = groups.SEED
    dtype: str | None = groups.RUN_DTYPE

    @property
    def bounds_s(self) -> tuple[float | None, ...]:
        """Bounds in seconds; empty: a point on the frontier is chosen. None in it: unbounded."""
        return (parse_duration(self.latency_bound),) if self.latency_bound else ()
