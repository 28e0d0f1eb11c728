"""The options of `exegpt simulate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exegpt.options import groups

if TYPE_CHECKING:
    from xscheduler.ordering import OrderChoice


@dataclass(frozen=True, kw_only=True)
class PlanSimulationOptions(groups.TraceOptions, groups.PluginOptions):
    """The options that the simulation of a plan takes too."""

    plan: Annotated[
        Path | None,
        typer.Option(help="A plan of several models; its --replay trace has a column `model`."),
    ] = None
    timeline: Annotated[Path | None, typer.Option(help="Write a timeline for Perfetto to this file.")] = None
    replay: Annotated[
        str | None,
        typer.Option(
            help="Simulate the requests of this trace one by one. For --prefix-caching, its columns say which prompts "
            "begin with the same tokens: hash_ids, prompt_ids, prefix_id with prefix_tokens, session_id or "
            "conversation_id, chat_id with parent_chat_id."
        ),
    ] = None
    profile: groups.PROFILES = None
    threads: groups.THREADS = None


@dataclass(frozen=True, kw_only=True)
class EngineRulesOptions:
    """An engine's settings besides its control variables."""

    policy: Annotated[
        str | None, typer.Option(help="The policy, with its control variables. Default: chunked, as in vLLM.")
    ] = None
    kv_blocks: Annotated[
        int | None, typer.Option(min=1, help="KV blocks on each stage. Default: as many as fit into memory.")
    ] = None
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens per KV block. Default: 16.")] = None
    admission: groups.ADMISSION = None
    prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            help="Reuse KV blocks for requests that begin with the same tokens, and for preempted ones (orca, chunked)."
            " Default: that of --engine; off without --engine.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(
    groups.ProblemOptions,
    groups.ControlOptions,
    EngineRulesOptions,
    groups.PredictionOptions,
    PlanSimulationOptions,
):
    """A schedule's file, or a model on a cluster with an engine's settings; None: not passed."""

    schedule: groups.SCHEDULE = None
    command: Annotated[
        str | None,
        typer.Option(help="A launch command of vLLM or SGLang, whose settings are simulated: 'vllm serve M …'."),
    ] = None
    rate: groups.RATE = None
    seed: groups.SEED = 0
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write each replayed request's times to this file, as JSON lines."),
    ] = None
    order: groups.ORDER = None
    starvation_guard: groups.STARVATION_GUARD = False
    ranker_tau: Annotated[
        float | None,
        typer.Option(help="Kendall's tau of the ranker that --order learned simulates, up to 1. Default: 0.55."),
    ] = None

    @property
    def order_choice(self) -> "OrderChoice":
        """The order that the options select; InputError for options that contradict each other."""
        from xscheduler.ordering import OrderChoice

        return OrderChoice.of(self.order, self.starvation_guard, tau=self.ranker_tau)

    @property
    def one_by_one(self) -> bool:
        """Whether requests are simulated one by one instead of a steady state."""
        return self.replay is not None or self.rate is not None
