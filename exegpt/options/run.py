"""The options of `exegpt run`."""

from dataclasses import dataclass
from pathlib import Path

from exegpt.options import shared_options
from exegpt.options.option_record import option
from exegpt.options.values import only_model
from xcore.duration import parse_duration
from xcore.errors import InputError


@dataclass(frozen=True, kw_only=True)
class RunOfPlanOptions(
    shared_options.TraceOptions,
    shared_options.DeviceOptions,
    shared_options.PluginOptions,
    shared_options.PlanOrderOptions,
):
    """The options that a run of a plan takes too."""

    model: list[str] | None = option(None, "A model directory in the Hugging Face layout; with --plan NAME=DIR.", "-m")
    requests: str | None = option(None, "A file of requests: JSONL, or a trace; - is standard input.", "-r")
    plan: Path | None = option(None, "Run several models by this plan of `exegpt plan`; requests name their `model`.")
    application: Path | None = option(None, "With --plan: a YAML file of calls that read each other's outputs.")
    in_turn: bool = option(False, "With --application: run one model after the other, for comparison.")
    out: Path | None = option(None, "Write one JSON line per result.", "-o")
    resume: bool = option(False, "Continue an interrupted run.")
    seed: int = shared_options.SEED


@dataclass(frozen=True, kw_only=True)
class OneModelRunOptions(
    shared_options.ControlOptions,
    shared_options.OrderOptions,
    shared_options.AdjustOptions,
    shared_options.ShuffleOptions,
):
    """The options of a run of one model."""

    schedule: Path | None = shared_options.SCHEDULE
    skip_invalid: bool = option(False, "Report an error for each invalid request instead of refusing the whole list.")
    latency_bound: str = option("inf", shared_options.LATENCY_BOUND_HELP, "-l")
    profile: str | None = shared_options.PROFILE
    no_profile: bool = option(
        False, "If this machine has no profile, use its roofline instead of first measuring a few points."
    )
    policy: str | None = shared_options.POLICY
    admission: str | None = shared_options.ADMISSION
    prefix_caching: bool = option(
        False, "Reuse KV blocks for requests that begin with the same tokens and for preempted ones (orca, chunked)."
    )
    kv_blocks: int | None = option(None, "KV blocks on each stage, instead of the schedule's.", min=1)
    adapt: bool = option(False, "When lengths drift, search again and change the schedule during the run.")
    dtype: str | None = shared_options.RUN_DTYPE
    kv_dtype: str | None = shared_options.RUN_KV_DTYPE
    report: Path | None = shared_options.REPORT


@dataclass(frozen=True, kw_only=True)
class RunOptions(
    RunOfPlanOptions,
    OneModelRunOptions,
    shared_options.TraceOptions,
    shared_options.DeviceOptions,
    shared_options.PluginOptions,
):
    """The requests of a run, its schedule, and the files of its results."""

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
        rules = ("adapt", "adjust", "no_adjust", "shuffle", "admission", "kv_blocks", "prefix_caching", "order_choice")
        names = (*files, "resume", *rules)
        return {"model": self.directory, "requests": self.source} | {name: str(getattr(self, name)) for name in names}
