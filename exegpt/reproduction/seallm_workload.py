"""SeaLLM's services: LLMs with clusters of request lengths, bursty arrivals, and the times of their requests alone.

Neither the traces nor the data sets are available: lengths are log-normal with the means given in the paper, and gaps
between arrivals have a Gamma distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from exegpt.reproduction.vllm_of_2024 import VLLM_OF_2024
from xcore.arrays import Array, Flags, Places
from xcore.batching import Hints
from xcore.batching.shared_pool import block_of
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import ClusterSpec, parse_cluster
from xcore.specs.engine_memory import DATA_SHEET
from xcore.specs.model import ModelSpec
from xcore.specs.profile import Profile
from xcore.specs.schedule import BLOCK_SIZE, Stage
from xcore.specs.workload import RequestLengths
from xcore.traces.arrivals import random_arrivals_until
from xmulti.sharing.cluster_replay import ServiceRequests
from xmulti.sharing.iteration_cost import ProfileCost
from xprofiler.roofline import roofline_profile
from xsimulator.cost.batch_one_latency import batch_one_times
from xsimulator.cost.cost_model import CostModel, ReplicaCost
from xsimulator.cost.memory import StageMemory

LLMS = ("llama-2-7b", "llama-2-13b", "llama-2-70b", "opt-6.7b")
SETS = {"ShareGPT": (73.0, 426.9), "LongBench": (13186.8, 21.1)}
"""Mean tokens of prompts and outputs (paper, Table 1)."""
VARIATION = 1.0
"""Coefficient of variation of all lengths."""
SERVICES = 16
SAMPLES = 4000
"""Number of samples of each data set, for the clusters."""
POPULARITY = 0.9
"""The k-th service has k^-0.9 times the first one's requests: one of MuxServe's popularities."""
NODE, NODES = 8, 4
"""Devices of a node, and number of nodes."""
PREFILL_TOKENS = 2048
SLO = 5.0
"""Bounds as a multiple of the time alone."""
_SEED = 5


@dataclass(frozen=True, eq=False)
class OnDevices:
    """An LLM on a number of devices."""

    cost: ProfileCost
    replica: ReplicaCost
    memory: StageMemory
    """Memory of each device."""


@lru_cache
def cluster_of(nodes: int) -> ClusterSpec:
    """Return a cluster of nodes with eight A800 each."""
    return parse_cluster(f"{nodes}x{NODE}xA800-80GB")


@lru_cache
def profile_of(llm: str) -> Profile:
    """Return the roofline profile with the engine release of the paper's time."""
    return roofline_profile(builtin_model(llm), cluster_of(NODES), "fp16", engine=VLLM_OF_2024)


def kv_block(model: ModelSpec) -> tuple[int, int]:
    """Return the bytes and the pieces of a block of the model's keys and values (see `block_of`)."""
    return block_of(model, BLOCK_SIZE, "fp16")


def longest(model: ModelSpec) -> int:
    """Return the blocks of a sequence that fills the model's context, plus one."""
    return model.context // BLOCK_SIZE + 1


@lru_cache
def on_devices(llm: str, tp: int) -> OnDevices | None:
    """Return the LLM on `tp` devices; None if its weights and a sequence that fills its context don't fit."""
    model = builtin_model(llm)
    stages = (Stage(tuple(range(tp)), tp, "both", None, (0, model.layers)),)
    replica = CostModel(model, cluster_of(NODES), profile_of(llm), "fp16", memory=DATA_SHEET).replica(stages)
    (memory,) = replica.memory((PREFILL_TOKENS, 1))
    if tp * memory.free < longest(model) * kv_block(model)[0]:
        return None
    return OnDevices(ProfileCost(replica), replica, memory)


@dataclass(frozen=True, eq=False)
class SeaService:
    """An LLM with the lengths of its requests and its popularity."""

    name: str
    llm: str
    popularity: float
    """Share of all requests."""
    inputs: Array
    outputs: Array
    """Output lengths [samples], from which requests are drawn."""

    @property
    def model(self) -> ModelSpec:
        """The LLM."""
        return builtin_model(self.llm)

    @property
    def least(self) -> int:
        """The smallest number of devices, a power of two, on which it runs."""
        return next(tp for tp in (1, 2, 4, 8) if on_devices(self.llm, tp))

    def alone(self, inputs: Array, outputs: Array) -> tuple[Array, Array]:
        """Seconds of prefills and of complete requests on the fewest devices, with batch 1."""
        on = on_devices(self.llm, self.least)
        assert on is not None
        if not len(inputs):
            return inputs, inputs
        times = batch_one_times(on.replica, inputs, outputs)
        return times.prefill, times.total

    @cached_property
    def mean_s(self) -> float:
        """L̂: the mean time of the sample requests, each alone on the fewest devices."""
        return float(self.alone(self.inputs, self.outputs)[1].mean())

    @cached_property
    def sd_s(self) -> float:
        """The standard deviation of the sample requests' times, each alone on the fewest devices."""
        return float(self.alone(self.inputs, self.outputs)[1].std())


@lru_cache
def services() -> tuple[SeaService, ...]:
    """Return sixteen clusters of lengths, each with an LLM and a popularity drawn at random."""
    draws = np.random.default_rng(_SEED)
    lengths = np.concatenate([_lognormal(draws, means) for means in SETS.values()])
    clusters, llms = clustered(lengths, draws)
    weights = draws.permutation(np.arange(1.0, SERVICES + 1) ** -POPULARITY)
    shares = (weights / weights.sum()).tolist()
    return tuple(
        SeaService(f"s{place:02d}", llm, share, *within_context(llm, *lengths[clusters == place].T))
        for place, (llm, share) in enumerate(zip(llms, shares, strict=True))
    )


def clustered(lengths: Array, draws: np.random.Generator) -> tuple[Places, list[str]]:
    """Return the cluster (one of `SERVICES`) of each of the lengths [requests, 2], and each cluster's LLM at random."""
    clusters = k_means(np.log(lengths), SERVICES, draws)
    return clusters, draws.permutation([LLMS[place % len(LLMS)] for place in range(SERVICES)]).tolist()


def within_context(llm: str, inputs: Array, outputs: Array) -> tuple[Array, Array]:
    """Return lengths cut to an LLM's context: outputs to half of it, prompts to the rest."""
    context = builtin_model(llm).context
    outputs = np.minimum(outputs, context // 2)
    return np.minimum(inputs, context - outputs), outputs


def _lognormal(draws: np.random.Generator, means: tuple[float, float]) -> Array:
    """Return [samples, 2]: whole tokens of prompts and outputs, at least one."""
    sigma2 = np.log(1 + VARIATION**2)
    drawn = draws.lognormal(np.log(means) - sigma2 / 2, np.sqrt(sigma2), (SAMPLES, 2))
    rounded: Array = np.maximum(1.0, np.rint(drawn))
    return rounded


def k_means(points: Array, count: int, draws: np.random.Generator, rounds: int = 50) -> Places:
    """Return the cluster number (below `count`) of each of the points [n, d].

    Uses Lloyd's algorithm on coordinates of unit deviation. It starts at points drawn by their squared distances from
    earlier ones (k-means++).
    """
    scaled = (points - points.mean(axis=0)) / points.std(axis=0)
    centres = scaled[draws.integers(len(scaled))][None]
    while len(centres) < count:
        away = ((scaled[:, None] - centres) ** 2).sum(axis=2).min(axis=1)
        centres = np.vstack([centres, scaled[draws.choice(len(scaled), p=away / away.sum())]])
    for _ in range(rounds):
        nearest: Places = ((scaled[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
        centres = np.array([scaled[nearest == place].mean(axis=0) for place in range(count)])
    return nearest


@dataclass(frozen=True)
class Traffic:
    """The arrival process of requests."""

    rate_seq_s: float
    """Rate of all services together."""
    variation: float
    """Coefficient of variation of the gaps between one service's arrivals."""
    seconds: float
    seed: int
    noise: float = 0.0
    """Standard deviation of the noise added to each output, relative to it; expected outputs don't change."""
    run: int = 1
    """Number of successive requests of one service that arrive together."""


@dataclass(frozen=True, eq=False)
class ServiceArrays:
    """A service's requests; each array has the shape [requests], in seconds and tokens."""

    service: SeaService
    arrival_s: Array
    inputs: Array
    outputs: Array
    expected: Array
    """Profiled output tokens: the noise of a request is unknown until it ends."""

    @cached_property
    def alone_s(self) -> Array:
        """Seconds that each request takes alone on the fewest devices."""
        return self.service.alone(self.inputs, self.outputs)[1]

    @cached_property
    def requests(self) -> ServiceRequests:
        """The requests with the hints that orders need."""
        prefill_s, expected_s = self.service.alone(self.inputs, self.expected)
        rows = zip(self.inputs, self.outputs, self.arrival_s, strict=True)
        known = Hints(service=self.service.name, service_time_s=self.service.mean_s, service_sd_s=self.service.sd_s)
        hints = [
            replace(known, prefill_s=float(p), time_s=float(t), output_tokens=int(o))
            for p, t, o in zip(prefill_s, expected_s, self.expected, strict=True)
        ]
        return ServiceRequests(tuple(RequestLengths(int(i), int(o), float(at)) for i, o, at in rows), tuple(hints))

    def only(self, which: "slice[int, None, int] | Flags") -> "ServiceArrays":
        """Return a selection of the requests."""
        columns = (self.arrival_s, self.inputs, self.outputs, self.expected)
        return ServiceArrays(self.service, *(column[which] for column in columns))

    def later(self, seconds: float) -> "ServiceArrays":
        """Return the same requests, shifted to later times."""
        return replace(self, arrival_s=self.arrival_s + seconds)


def joined(parts: Sequence[ServiceArrays]) -> ServiceArrays:
    """Return a service's requests, concatenated."""
    columns = zip(*((part.arrival_s, part.inputs, part.outputs, part.expected) for part in parts), strict=True)
    return ServiceArrays(parts[0].service, *map(np.concatenate, columns))


def traffic_of(traffic: Traffic, of: Sequence[SeaService]) -> dict[str, ServiceArrays]:
    """Return every service's requests in `traffic.seconds`; the arrival process is stationary from the start."""
    return {service.name: _asked(service, traffic, place) for place, service in enumerate(of)}


def _asked(service: SeaService, traffic: Traffic, place: int) -> ServiceArrays:
    rate = traffic.rate_seq_s * service.popularity / traffic.run
    seed, until_s = (traffic.seed, place), 2 * traffic.seconds
    arrivals = random_arrivals_until(until_s, rate, seed, traffic.variation**-2)
    arrivals = np.repeat(arrivals[arrivals >= traffic.seconds] - traffic.seconds, traffic.run)
    draws = np.random.default_rng((*seed, 1))
    drawn = draws.integers(len(service.inputs), size=len(arrivals))
    inputs, expected = service.inputs[drawn], service.outputs[drawn]
    factors = np.maximum(0.0, 1 + traffic.noise * draws.standard_normal(len(arrivals)))
    outputs = np.clip(np.rint(expected * factors), 1, service.model.context - inputs)
    return ServiceArrays(service, arrivals, inputs, outputs, expected)
