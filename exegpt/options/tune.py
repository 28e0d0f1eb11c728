"""The options of `exegpt tune`."""

from dataclasses import dataclass
from pathlib import Path

from exegpt.options import shared_options
from exegpt.options.option_record import option


@dataclass(frozen=True, kw_only=True)
class BoundOptions:
    """The latency bounds, and the share of requests that must keep them."""

    latency_bound: str | None = option(
        None,
        shared_options.LATENCY_BOUND_HELP
        + " Several bounds, separated by commas, give the frontier. Default with --ttft, --tpot or --agents: inf.",
        "-l",
    )
    bound: str = option(
        "requests",
        "The meaning of the latency bound. requests (also p99-queries): --percentile of all requests keep it. "
        "p99-length: a sequence of the 99th-percentile output length keeps it, as in the ExeGPT paper.",
    )
    percentile: float = option(99.0, "The share of requests in % that keeps each bound: 50 to 99.9.")
    ttft: str | None = option(None, "A bound on the time to first token, for --percentile of the requests.")
    tpot: str | None = option(None, "A bound on the time per output token, for --percentile of the requests.")


@dataclass(frozen=True, kw_only=True)
class SearchMethodOptions:
    """Which schedules are searched, how, and on which machine."""

    policy: str | None = shared_options.POLICY
    search: str = option("bnb", "The search method: bnb (branch and bound), exhaustive or optuna.")
    tolerance: float = option(0.0, "The share by which a space may violate monotonicity.", min=0.0, max=1.0)
    admission: str = option("reserve", shared_options.ADMISSION_HELP + " auto: the better of both.")
    prefix_caching: bool = option(
        False,
        "With --rate or --agents: reuse KV blocks of prompts that begin with the same tokens (orca, chunked). The "
        "trace's columns say which do: hash_ids, prompt_ids, prefix_id with prefix_tokens, session_id, "
        "conversation_id, chat_id. With --agents, these policies always do; this leaves out the others.",
    )
    device: str | None = shared_options.DEVICE
    threads: int | None = shared_options.THREADS


@dataclass(frozen=True, kw_only=True)
class ArrivalOptions:
    """Requests that arrive over time, and the prices of clusters that serve them."""

    rate: str | None = option(
        None, shared_options.RATE_HELP + " Several rates, separated by commas, give an answer for each."
    )
    load_curve: Path | None = option(
        None,
        "Instead of --rate: a CSV file with the columns hour and rate (requests/s). The answer is for the highest "
        "rate, with the replicas of each hour.",
    )
    arrivals: str = option(
        "poisson", "Arrivals: poisson (at --rate), or trace (its own times, scaled to --rate if given)."
    )
    price: Path | None = option(None, shared_options.PRICE_HELP + " With several clusters, the answer is the cheapest.")
    devices: str | None = option(
        None,
        "With --rate, instead of --cluster: device kinds, separated by commas, or any. The answer is how many of which "
        "kind sustain the rate: the cheapest by --price, else the fewest.",
    )
    top: int = option(
        1,
        "With --devices: the number of answers, over kinds, tensor parallelism, pipeline stages, expert parallelism "
        "and replicas.",
        min=1,
        max=100,
    )
    disaggregated: bool = option(
        False,
        "With --rate: also search replicas that only prefill beside replicas that only decode (xP yD), each with its "
        "own tensor parallelism.",
    )
    seed: int = shared_options.SEED

    @property
    def open_system(self) -> bool:
        """Whether requests arrive over time."""
        return self.rate is not None or self.load_curve is not None or self.arrivals == "trace"


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """The output and the files of a search."""

    advice: bool | None = option(
        None,
        "Predict the effect of a looser bound and of other clusters. Default: only for one bound and up to "
        "eight devices.",
        "--advice/--no-advice",
    )
    explain: bool = option(
        False, "Print all reasons for each policy's rank, and what limits it. Default: the main reason."
    )
    out: Path | None = option(
        None, "Write the schedule to this file; with several bounds, that of the last feasible one.", "-o"
    )
    export: str | None = option(
        None,
        "Print the launch command of the best schedule that an engine runs: vllm, sglang or tensorrt-llm. Its time "
        "and memory are then predicted, unless --engine says otherwise.",
    )
    export_as: str | None = option(
        None, "The form of --export: command (default), kubernetes (a manifest) or compose (a file for one machine)."
    )
    export_out: Path | None = option(None, "Write the export to this file; with several bounds, the last one.")
    report: Path | None = shared_options.REPORT


@dataclass(frozen=True, kw_only=True)
class TuneOptions(
    BoundOptions,
    shared_options.ProblemOptions,
    SearchMethodOptions,
    shared_options.ControlOptions,
    shared_options.PrefixHitOptions,
    shared_options.PredictionOptions,
    shared_options.SpeculationOptions,
    shared_options.TraceOptions,
    shared_options.AgentOptions,
    ArrivalOptions,
    AnswerOptions,
    shared_options.PluginOptions,
):
    """A search problem, and its output."""

    @property
    def caches_prefixes(self) -> bool:
        """Whether schedules cache prefixes."""
        return self.prefix_caching or bool(self.prefix_hit)
