"""The options of `exegpt simulate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from exegpt.options import shared_options
from exegpt.options.option_record import option

if TYPE_CHECKING:
    from xscheduler.ordering import OrderChoice


@dataclass(frozen=True, kw_only=True)
class PlanSimulationOptions(shared_options.TraceOptions, shared_options.PluginOptions):
    """The options that the simulation of a plan takes too."""

    plan: Path | None = option(None, "A plan of several models; its --replay trace has a column `model`.")
    timeline: Path | None = option(None, "Write a timeline for Perfetto to this file.")
    replay: str | None = option(
        None,
        "Simulate the requests of this trace one by one. For --prefix-caching, its columns say which prompts "
        "begin with the same tokens: hash_ids, prompt_ids, prefix_id with prefix_tokens, session_id or "
        "conversation_id, chat_id with parent_chat_id.",
    )
    profile: list[str] | None = shared_options.PROFILES
    threads: int | None = shared_options.THREADS
    order: str | None = option(
        None, shared_options.ORDER_HELP + " With --plan: fcfs, sjf or learned. Default there: that of its method."
    )
    ranker_tau: float | None = option(
        None, "Kendall's tau of the ranker that --order learned simulates, up to 1. Default: 0.55."
    )


@dataclass(frozen=True, kw_only=True)
class EngineRulesOptions:
    """An engine's settings besides its control variables."""

    policy: str | None = option(None, "The policy, with its control variables. Default: chunked, as in vLLM.")
    kv_blocks: int | None = option(None, "KV blocks on each stage. Default: as many as fit into memory.", min=1)
    block_size: int | None = option(None, "Tokens per KV block. Default: 16.", min=1)
    admission: str | None = shared_options.ADMISSION
    prefix_caching: bool | None = option(
        None,
        "Reuse KV blocks for requests that begin with the same tokens, and for preempted ones (orca, chunked)."
        " Default: that of --engine; off without --engine.",
        "--prefix-caching/--no-prefix-caching",
    )


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(
    shared_options.ProblemOptions,
    shared_options.ControlOptions,
    shared_options.AdjustOptions,
    shared_options.ShuffleOptions,
    EngineRulesOptions,
    shared_options.PrefixHitOptions,
    shared_options.PredictionOptions,
    shared_options.SpeculationOptions,
    shared_options.AgentOptions,
    PlanSimulationOptions,
):
    """A schedule's file, or a model on a cluster with an engine's settings; None: not passed."""

    schedule: Path | None = shared_options.SCHEDULE
    command: str | None = option(
        None, "A launch command of vLLM, SGLang or TensorRT-LLM, whose settings are simulated: 'vllm serve M …'."
    )
    rate: str | None = shared_options.RATE
    seed: int = shared_options.SEED
    out: Path | None = option(None, "Write each replayed request's times to this file, as JSON lines.", "-o")
    starvation_guard: bool = shared_options.STARVATION_GUARD
    graphs: Path | None = shared_options.GRAPHS
    warm_prefixes: str | None = shared_options.WARM_PREFIXES
    knob: float | None = shared_options.KNOB
    preempt: str | None = shared_options.PREEMPT
    swap_blocks: int | None = shared_options.SWAP_BLOCKS

    @property
    def order_choice(self) -> "OrderChoice":
        """The order that the options select; InputError for options that contradict each other."""
        from xscheduler.ordering import OrderChoice

        further = (self.warm_prefixes, self.knob, self.preempt, self.swap_blocks)
        return OrderChoice.of(self.order, self.starvation_guard, None, self.ranker_tau, self.graphs, *further)

    @property
    def one_by_one(self) -> bool:
        """Whether requests are simulated one by one instead of a steady state."""
        return self.replay is not None or self.rate is not None or self.agents is not None
