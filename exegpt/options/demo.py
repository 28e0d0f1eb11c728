"""The options of `exegpt demo`."""

from dataclasses import dataclass
from pathlib import Path

from exegpt.options import shared_options
from exegpt.options.option_record import option
from xcore.duration import parse_duration


@dataclass(frozen=True, kw_only=True)
class DemoOptions(shared_options.DeviceOptions, shared_options.JsonOption):
    """The requests, the bound and the folder of the demo."""

    trace: str | None = option(None, "Use the lengths of this trace.")
    workload: str | None = shared_options.WORKLOAD
    latency_bound: str | None = option(
        None,
        shared_options.LATENCY_BOUND_HELP + " Default: a bound under which the best schedule is also the best one "
        "for these few requests.",
        "-l",
    )
    num: int | None = option(None, "Number of requests. Default: as many as fit in a minute.", "-n", min=1)
    directory: Path = option(Path("exegpt-demo"), "The folder for all results.", "--dir")
    columns: str | None = shared_options.COLUMNS
    seed: int = shared_options.SEED
    dtype: str | None = shared_options.RUN_DTYPE

    @property
    def bounds_s(self) -> tuple[float | None, ...]:
        """Bounds in seconds (None: unbounded); empty to choose a point on the frontier."""
        return (parse_duration(self.latency_bound),) if self.latency_bound else ()
