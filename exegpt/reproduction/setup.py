"""The common setup of the evaluation: models on clusters (paper, Table 2), tasks, and ExeGPT as in the paper."""

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict

from xcore.batching.admission import Admission
from xcore.console.schedule_text import schedule_text
from xcore.specs.bound import PAPER_BOUND, BoundMeaning
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import ClusterSpec, parse_cluster
from xcore.specs.engine_spec import find_engine
from xcore.specs.model import ModelSpec
from xcore.specs.profile import Profile
from xcore.specs.schedule import Stage
from xcore.specs.workload import Workload, task
from xprofiler.roofline import roofline_profile
from xscheduler.search import Method
from xscheduler.tune import tune
from xscheduler.tuned import Tuned
from xsimulator.cost.cost_model import CostModel
from xsimulator.steady.load import Load
from xsimulator.steady.residents import Form
from xsimulator.steady.scenario import Scenario

if TYPE_CHECKING:
    from typing_extensions import Unpack


MEMORY_FRACTION = 1.0
"""The paper names its devices' memory (48 and 80 GB), but no share that its engines leave free."""
_A40_BYTES = 48 * 2.0**30
"""The paper's memory of an A40; with error correction nvidia-smi shows 45 GiB."""
WAA = ("waa-c", "waa-m")
PAPER_POLICIES = ("rra", *WAA)
WITHOUT_WAA = ("gpt3-175b", "gpt3-341b")
"""Models without WAA in the paper: two copies of their weights didn't fit in memory there."""


@dataclass(frozen=True)
class Setup:
    """A model on a cluster under a task, in fp16 on the stock roofline under the paper's engine."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    profile: Profile

    @property
    def name(self) -> str:
        """The name in tables."""
        return f"{self.model.name} {self.cluster.name} {self.workload.name}"

    @property
    def specs(self) -> tuple[ModelSpec, ClusterSpec, Workload, Profile]:
        """The inputs of `tune`."""
        return self.model, self.cluster, self.workload, self.profile

    def scenario(self, stages: tuple[Stage, ...], form: Form = "exact", watched: bool = True) -> Scenario:
        """Return the scenario of one replica's stages, without an allowance for variation."""
        cost_model = CostModel(self.model, self.cluster, self.profile, self.profile.dtype, watched)
        load = Load(self.workload, self.model.encoder_layers > 0, form)
        return Scenario(cost_model.replica(stages), load, PAPER_BOUND, variation=False)


def setup(model: str, cluster: str, task_name: str) -> Setup:
    """Return one of the paper's settings, by its names."""
    spec, where, profile = _place(model, cluster)
    return Setup(spec, where, task(task_name), profile)


@functools.cache
def _place(model: str, cluster: str) -> tuple[ModelSpec, ClusterSpec, Profile]:
    spec, where = builtin_model(model), parse_cluster(cluster, MEMORY_FRACTION)
    if where.device.kind == "A40":
        where = replace(where, device=replace(where.device, memory_bytes=_A40_BYTES))
    return spec, where, roofline_profile(spec, where, engine=find_engine("paper"))


@dataclass(frozen=True)
class Reached:
    """The performance of a schedule."""

    throughput_seq_s: float
    latency_s: float
    """Latency of a sequence of the 99th-percentile length; for FasterTransformer, of the longest."""
    schedule: str


class PaperKeywords(TypedDict, total=False):
    """Further keywords of `xscheduler.tune`."""

    method: Method
    tolerance: float
    admission: tuple[Admission, ...]
    encode_micro_batches: tuple[int, ...]
    partial: bool


def paper_mode(
    setup: Setup,
    bound_s: float | None,
    policies: tuple[str, ...] = PAPER_POLICIES,
    bound: BoundMeaning = PAPER_BOUND,
    fixed: dict[str, int] | None = None,
    **asked: "Unpack[PaperKeywords]",
) -> Tuned:
    """Search as the paper did: RRA and WAA, one replica, partial tensor parallelism, a bound on the p99 length only.

    Batches aren't adjusted: the paper's allowance is for the variation of its unadjusted batches (its Table 7). The
    steady state is counted exactly. The paper's own B_D = B_E / E[1/c] omits many residents at small N_D, so a
    search would find throughputs that no run could reach.
    """
    how = {"replicas": 1} if fixed is None else fixed
    return tune(*setup.specs, latency_bound_s=bound_s, policies=policies, bound=bound, fixed=how, adjust=None, **asked)


def today(setup: Setup, bound_s: float | None) -> Tuned:
    """Return the best schedule under the same bound with all policies and replicas."""
    return tune(*setup.specs, latency_bound_s=bound_s, bound=PAPER_BOUND, adjust=None)


def reached(tuned: Tuned, policies: tuple[str, ...]) -> Reached | None:
    """Return the best performance of these policies; None if none of them meets the bound."""
    points = [
        Reached(a.estimate.throughput_seq_s, a.estimate.latency_s or 0.0, schedule_text(a.schedule))
        for a in tuned.alternatives
        if a.policy in policies and a.schedule and a.estimate
    ]
    return max(points, key=lambda point: point.throughput_seq_s, default=None)


def deviation(ours: float, paper: float) -> float:
    """Return (here - paper) / paper."""
    return ours / paper - 1.0
