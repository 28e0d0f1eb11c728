"""Hermes' larger setting (Figure 10): 3,000 applications on two LLaMA-3-70B, each with TP 4, on eight H800.

Iterations take what the stock roofline says, by batch and context. An H800 is an H100 whose NVLink has 400 of 900 GB/s.
Applications are dealt to the two LLMs in turn; all calls of one go to the same LLM.

Demands count an output token as its part of a full batch's iteration. Hermes' repository counts an iteration for each:
here that is over a hundred times as much, and applications with long prompts, which take most of the GPUs' time, would
seem small.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from exegpt.reproduction.hermes_setting import LOADS, Models, completion_seconds
from exegpt.reproduction.hermes_workload import draw_submissions, learn_graphs
from exegpt.reproduction.vllm_of_2024 import VLLM_OF_2024
from xcore.applications.demand import ApplicationDemand, ServiceRates
from xcore.applications.demand_graph import DemandGraph
from xcore.arrays import Array
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.engine_memory import DATA_SHEET
from xcore.specs.schedule import Stage
from xmulti.applications.application_progress import DemandEstimates
from xmulti.applications.llm_backend import LLMLimits
from xmulti.applications.orders import (
    ApplicationOrder,
    ByApplication,
    ByRequest,
    VirtualTokens,
    application_gittins,
)
from xmulti.applications.submission import Submission
from xmulti.sharing.iteration_cost import ProfileCost
from xprofiler.roofline import roofline_profile
from xsimulator.cost.cost_model import CostModel

MODEL, TP, LLMS = "llama-3-70b", 4, 2
BATCH = 256
"""Requests that run at once: vLLM's default then."""
NVLINK = 400 / 900
"""An H800's NVLink over an H100's."""
APPLICATIONS = 3000
QUICK_APPLICATIONS, QUICK_LOADS = 600, ("3x",)
"""Fewer applications at the same rate, for `--quick`."""
CONTEXT = 1000
"""Tokens at which the seconds of a prompt's and of an output token are taken, for demands."""
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
"""Printed quantiles of completion times, for the paper's CDFs (Figures 9b and 10b)."""
PAPER = {"vLLM": (-0.585, -0.622), "Parrot": (-0.391, -0.217), "VTC": (-0.503, -0.458)}
"""Hermes' change of the mean and of the 95th percentile at 3x."""


@dataclass(frozen=True)
class ScaleResult:
    """One order under one load: seconds from arrival to end."""

    load: str
    order: str
    mean_s: float
    p95_s: float
    mean_reduction: float
    """Relative change by Hermes: -0.5 is half."""
    p95_reduction: float
    quantiles_s: tuple[float, ...]
    """At `QUANTILES`."""


@functools.cache
def limits(batch: int = BATCH) -> LLMLimits:
    """Return one LLM's seconds and cache, on four of the GPUs; demands are those of a batch of `batch`."""
    model, h100 = builtin_model(MODEL), parse_cluster("8xH100-80GB")
    cluster = replace(h100, intra=replace(h100.intra, bandwidth_bytes_s=h100.intra.bandwidth_bytes_s * NVLINK))
    profile = roofline_profile(model, cluster, "fp16", engine=VLLM_OF_2024)
    stages = (Stage(tuple(range(TP)), TP, "both", None, (0, model.layers)),)
    replica = CostModel(model, cluster, profile, "fp16", memory=DATA_SHEET).replica(stages)
    cost = ProfileCost(replica)
    (memory,) = replica.memory((model.context, 1))
    token_bytes = model.layers * model.kv_bytes(1, "fp16")
    iteration_s = float(cost.decode_seconds(batch, np.array([float(CONTEXT)]), 1.0)[0])
    rates = ServiceRates(cost.prefill_seconds([CONTEXT], 1.0) / CONTEXT, iteration_s / batch)
    return LLMLimits(rates, BATCH, int(TP * memory.free // token_bytes), token_bytes, cost)


def scale(
    graphs: Sequence[DemandGraph], seed: int, applications: int = APPLICATIONS, loads: Sequence[str] = tuple(LOADS)
) -> tuple[ScaleResult, ...]:
    """Return the completion times of the orders under the loads; fewer applications come at the same rate."""
    learned = learn_graphs(graphs, 1_000_000)

    def estimates(batch: int) -> DemandEstimates:
        models: Models = {name: ApplicationDemand(graph, limits(batch).rates) for name, graph in learned.items()}
        return DemandEstimates(models)

    orders: dict[str, tuple[Callable[[], ApplicationOrder], DemandEstimates | None, int]] = {
        "Hermes": (application_gittins, estimates(BATCH), BATCH),
        "Hermes, seconds alone": (application_gittins, estimates(1), 1),
        "vLLM": (ByRequest, None, BATCH),
        "Parrot": (ByApplication, None, BATCH),
        "VTC": (VirtualTokens, None, BATCH),
    }
    rows = []
    for load in loads:
        workload = draw_submissions(graphs, applications, LOADS[load] * 60 * applications / APPLICATIONS, seed)
        seconds = {
            name: completion_seconds(_dealt(workload, name == "VTC"), order, known, limits(batch))
            for name, (order, known, batch) in orders.items()
        }
        hermes = _mean_and_p95(seconds["Hermes"])
        for name, each in seconds.items():
            figures = _mean_and_p95(each)
            changes = hermes[0] / figures[0] - 1, hermes[1] / figures[1] - 1
            quantiles = tuple(np.quantile(each, QUANTILES).tolist())
            rows.append(ScaleResult(load, name, *figures, *changes, quantiles))
    return tuple(rows)


def _dealt(workload: Sequence[Submission], by_kind: bool) -> list[list[Submission]]:
    """Return each LLM's applications; `by_kind`: the clients are the kinds of applications."""
    clients = [replace(each, client=each.name) for each in workload] if by_kind else workload
    return [list(clients[llm::LLMS]) for llm in range(LLMS)]


def _mean_and_p95(seconds: Array) -> tuple[float, float]:
    return float(seconds.mean()), float(np.percentile(seconds, 95))
