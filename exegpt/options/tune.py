"""The options of `exegpt tune`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from exegpt.options import groups


@dataclass(frozen=True, kw_only=True)
class BoundOptions:
    """The bounds, and who must keep them."""

    latency_bound: Annotated[
        str | None,
        typer.Option(
            "--latency-bound",
            "-l",
            help=groups.LATENCY_BOUND_HELP
            + " Several bounds, separated by commas, give the frontier. Default with --ttft or --tpot: inf.",
        ),
    ] = None
    bound: Annotated[
        str,
        typer.Option(
            "--bound",
            help="The meaning of the latency bound. requests (also p99-queries): --percentile of all requests keep it. "
            "p99-length: a sequence of the 99th-percentile output length keeps it, as in the ExeGPT paper.",
        ),
    ] = "requests"
    percentile: Annotated[
        float, typer.Option("--percentile", help="The share of requests in % that keeps each bound: 50 to 99.9.")
    ] = 99.0
    ttft: Annotated[
        str | None, typer.Option(help="A bound on the time to first token, for --percentile of the requests.")
    ] = None
    tpot: Annotated[
        str | None, typer.Option(help="A bound on the time per output token, for --percentile of the requests.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class SearchMethodOptions:
    """Which schedules are searched, how, and on which machine."""

    policy: groups.POLICY = None
    search: Annotated[str, typer.Option(help="bnb (branch and bound), exhaustive or optuna")] = "bnb"
    tolerance: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="The share by which a space may violate monotonicity.")
    ] = 0.0
    admission: Annotated[str, typer.Option(help=groups.ADMISSION_HELP + " auto: the better of both.")] = "reserve"
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--prefix-caching",
            help="With --rate: reuse KV blocks of prompts that begin with the same tokens (orca, chunked). The trace's "
            "columns say which do: hash_ids, prompt_ids, prefix_id with prefix_tokens, session_id, conversation_id, "
            "chat_id.",
        ),
    ] = False
    device: groups.DEVICE = None
    threads: groups.THREADS = None


@dataclass(frozen=True, kw_only=True)
class ArrivalOptions:
    """Requests that arrive over time, and the prices of clusters that serve them."""

    rate: groups.RATE = None
    arrivals: Annotated[
        str, typer.Option(help="Arrivals: poisson (at --rate), or trace (its own times, scaled to --rate if given).")
    ] = "poisson"
    price: Annotated[Path | None, typer.Option(help=groups.PRICE_HELP + " The answer is the cheapest cluster.")] = None
    seed: groups.SEED = 0

    @property
    def open_system(self) -> bool:
        """Whether requests arrive over time."""
        return self.rate is not None or self.arrivals == "trace"


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """What is printed and written."""

    advice: Annotated[
        bool | None,
        typer.Option(
            "--advice/--no-advice",
            help="Predict the effect of a looser bound and of other clusters. Default: only for one bound and up to "
            "eight devices.",
        ),
    ] = None
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Print all reasons for each policy's rank, and what limits it. Default: the main reason."
        ),
    ] = False
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Write the schedule to this file; with several bounds, that of the last feasible one."
        ),
    ] = None
    export: Annotated[
        str | None, typer.Option(help="Print the launch command of the best schedule that an engine runs: vllm.")
    ] = None
    report: groups.REPORT = None


@dataclass(frozen=True, kw_only=True)
class TuneOptions(
    BoundOptions,
    groups.ProblemOptions,
    SearchMethodOptions,
    groups.ControlOptions,
    groups.PredictionOptions,
    groups.TraceOptions,
    ArrivalOptions,
    AnswerOptions,
    groups.PluginOptions,
):
    """A search problem, and its output."""
