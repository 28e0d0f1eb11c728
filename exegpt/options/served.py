"""The options that `exegpt serve` passes to its engine."""

from dataclasses import dataclass
from pathlib import Path

from exegpt.options import shared_options
from exegpt.options.option_record import option
from xcore.duration import parse_duration


@dataclass(frozen=True, kw_only=True)
class OneModelOptions(shared_options.OrderOptions, shared_options.TraceOptions, shared_options.AdjustOptions):
    """The schedule of one model's engine, or the options of its search; a plan determines all of them."""

    schedule: Path | None = option(None, "A schedule file. Default: measure this machine, then search.", "-s")
    latency_bound: str | None = option(None, shared_options.LATENCY_BOUND_HELP + " Default: none.", "-l")
    workload: str | None = shared_options.WORKLOAD
    policy: str | None = shared_options.POLICY
    admission: str | None = option(None, shared_options.ADMISSION_HELP + " Default: grow.")
    no_prefix_caching: bool = option(
        False,
        "Switch prefix caching off. Default: reuse KV blocks of prompts that begin with the same tokens.",
    )
    best_effort: bool = option(
        False, "If no schedule keeps the bound for 99% of requests, serve anyway; accept the requests that can meet it."
    )

    @property
    def latency_bound_s(self) -> float | None:
        """The bound in seconds; None: unbounded."""
        return parse_duration(self.latency_bound) if self.latency_bound else None

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies to search."""
        from xscheduler.policy_names import policy_names

        return policy_names(self.policy)

    @property
    def rule(self) -> str:
        """The admission rule of a searched schedule."""
        return self.admission or "grow"


@dataclass(frozen=True, kw_only=True)
class ServedOptions(OneModelOptions, shared_options.DeviceOptions):
    """The schedule and the device of an engine."""

    dtype: str | None = shared_options.RUN_DTYPE
    kv_dtype: str | None = shared_options.RUN_KV_DTYPE
    pinned: bool = option(False, "Keep schedules and the plan even if lengths or rates drift.")


@dataclass(frozen=True)
class EngineOptions:
    """A server's engine: its model, and its connection to the frontend."""

    asked: ServedOptions
    model: str
    socket: Path | None = None
    """The frontend's socket, which only rank 0 needs to know."""
    report_speed: bool = False
    """Whether the engine sends the machine's `Speed` to the frontend at its end."""
