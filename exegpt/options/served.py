"""The options that `exegpt serve` passes to its engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from exegpt.options import groups
from xcore.duration import parse_duration


@dataclass(frozen=True, kw_only=True)
class OneModelOptions(groups.OrderOptions, groups.TraceOptions):
    """The schedule of one model's engine, or what it is searched for; a plan determines all of it."""

    schedule: Annotated[
        Path | None,
        typer.Option("--schedule", "-s", help="A schedule file. Default: measure this machine, then search."),
    ] = None
    latency_bound: Annotated[
        str | None,
        typer.Option("--latency-bound", "-l", help=groups.LATENCY_BOUND_HELP + " Default: none."),
    ] = None
    workload: groups.WORKLOAD = None
    policy: groups.POLICY = None
    admission: Annotated[str | None, typer.Option("--admission", help=groups.ADMISSION_HELP + " Default: grow.")] = None
    best_effort: Annotated[
        bool,
        typer.Option(
            "--best-effort",
            help="If no schedule keeps the bound for 99% of requests, serve anyway; accept the requests that can "
            "meet it.",
        ),
    ] = False

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
        """The rule of admission for a schedule that is searched."""
        return self.admission or "grow"


@dataclass(frozen=True, kw_only=True)
class ServedOptions(OneModelOptions, groups.DeviceOptions):
    """The schedule and the device of an engine."""

    dtype: groups.RUN_DTYPE = None
    pinned: Annotated[
        bool,
        typer.Option("--pinned", help="Keep schedules and the plan even if lengths or rates drift."),
    ] = False
