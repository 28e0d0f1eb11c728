"""The options of `exegpt run`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from exegpt.options import groups
from exegpt.options.values import only_model
from xcore.duration import parse_duration
from xcore.errors import InputError


@dataclass(frozen=True, kw_only=True)
class RunOfPlanOptions(groups.TraceOptions, groups.DeviceOptions, groups.PluginOptions):
    """The options that a run of a plan takes too."""

    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", help="A model directory in the Hugging Face layout; with --plan NAME=DIR."),
    ] = None
    requests: Annotated[
        str | None, typer.Option("--requests", "-r", help="A JSONL or trace file, or - for standard input.")
    ] = None
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="Run several models by this plan of `exegpt plan`; requests name their `model`."),
    ] = None
    application: Annotated[
        Path | None,
        typer.Option("--application", help="With --plan: a YAML file of calls that read each other's outputs."),
    ] = None
    in_turn: Annotated[
        bool, typer.Option("--in-turn", help="With --application: run one model after the other, for comparison.")
    ] = False
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write one JSON line per result.")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False
    seed: groups.SEED = 0


@dataclass(frozen=True, kw_only=True)
class OneModelRunOptions(groups.ControlOptions, groups.OrderOptions):
    """The options of a run of one model."""

    schedule: groups.SCHEDULE = None
    skip_invalid: Annotated[
        bool, typer.Option("--skip-invalid", help="Give invalid requests an error instead of refusing the list.")
    ] = False
    latency_bound: Annotated[str, typer.Option("--latency-bound", "-l", help=groups.LATENCY_BOUND_HELP)] = "inf"
    profile: groups.PROFILE = None
    no_profile: Annotated[
        bool,
        typer.Option(
            "--no-profile",
            help="If this machine has no profile, use its roofline instead of first measuring a few points.",
        ),
    ] = False
    policy: groups.POLICY = None
    admission: groups.ADMISSION = None
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--prefix-caching",
            help="Reuse KV blocks for requests that begin with the same tokens and for preempted ones (orca, chunked).",
        ),
    ] = False
    kv_blocks: Annotated[
        int | None, typer.Option(min=1, help="KV blocks on each stage, instead of the schedule's.")
    ] = None
    adjust: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="RRA, WAA: choose the prompts so that the number of tokens in a batch deviates from the mean by at "
            "most this share.",
        ),
    ] = None
    adapt: Annotated[
        bool,
        typer.Option("--adapt", help="When lengths drift, search again and change the schedule during the run."),
    ] = False
    dtype: groups.RUN_DTYPE = None
    report: groups.REPORT = None


@dataclass(frozen=True, kw_only=True)
class RunOptions(RunOfPlanOptions, OneModelRunOptions, groups.TraceOptions, groups.DeviceOptions, groups.PluginOptions):
    """What is run, under which schedule, and where the results go."""

    @property
    def directory(self) -> str:
        """The directory of the only model."""
        return only_model(self.model, "run")

    @property
    def source(self) -> str:
        """The file of the requests."""
        if self.requests is None:
            raise InputError("A run needs requests: pass --requests FILE.")
        return self.requests

    @property
    def latency_bound_s(self) -> float | None:
        """The bound in seconds; None: unbounded."""
        return parse_duration(self.latency_bound)

    @property
    def policies(self) -> tuple[str, ...] | None:
        """The policies to search; None: all that can be searched."""
        from xscheduler.policy_names import policy_names

        return policy_names(self.policy) if self.policy else None

    def alike(self) -> dict[str, str]:
        """Return the options that must be the same on all ranks."""
        files = ("schedule", "out", "profile", "no_profile")
        names = (*files, "resume", "adapt", "adjust", "admission", "kv_blocks", "prefix_caching", "order_choice")
        return {"model": self.directory, "requests": self.source} | {name: str(getattr(self, name)) for name in names}
