"""Search prefill replicas beside decode replicas (xP yD) for requests that arrive over time.

Each side has its own tensor-parallel degree. A layout sustains at most what either side does if its requests always
wait. Layouts are tried in the order of this bound until no other can be better; each is replayed at the best rate so
far first, and measured by bisection only if it keeps the bounds there.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from xcore.arrays import Array
from xcore.errors import InputError
from xcore.policies.chunked import TRAITS
from xcore.specs.bound import BoundMeaning
from xcore.specs.estimate import Estimate
from xcore.specs.prefill_decode import PrefillDecode
from xcore.specs.request_times import RequestTimesColumns, summarise_columns
from xcore.specs.schedule import Schedule
from xcore.specs.workload import LengthDistribution, Workload
from xscheduler.candidates import Candidates, Size, schedule
from xscheduler.goodput import PRECISION, RateBounds, excess_of, missed_bounds
from xscheduler.open_searches import problem_at
from xscheduler.rate_sample import Arrivals, at
from xscheduler.replica_layout import ReplicaLayout, replica_layouts
from xscheduler.settings import Setting
from xscheduler.space import all_spaces
from xscheduler.spaces import spaces
from xsimulator.replay.compiled import Replicas, RequestArrays
from xsimulator.replay.prefill_decode_replay import HandedOver, hand_over

POLICY = TRAITS.name
"""The policy of both sides: iteration-level scheduling within a token budget, as in vLLM and SGLang."""
PREFILL_SEQUENCES, DECODE_SEQUENCES = 256, 1024
"""Sequences at a time of a replica of each side, at most; memory may hold fewer."""
PREFILL_BUDGETS, DECODE_BUDGET = (2048, 8192), 2048
"""Tokens per iteration of each side."""
TRIED, WAITING = 5_000, 4_000
"""Requests with which layouts are compared, and those that wait at once to measure what a side sustains."""
ABOVE = 1.25
"""Factor from the rate at which waiting requests are served, empty machine at both ends included, to a bound on it."""


def check_divisible(setting: Setting) -> None:
    """Raise InputError if the model or the cluster can't be divided into prefill and decode replicas."""
    model, cluster = setting.model, setting.cluster
    if model.encoder_layers:
        raise InputError(
            f"Model '{model.name}' is an encoder-decoder, which prefill and decode replicas can't divide: leave "
            "--disaggregated out."
        )
    if cluster.devices < 2:
        raise InputError(
            f"Prefill and decode replicas need at least 2 devices, but {cluster.name} has 1: leave --disaggregated out."
        )


@dataclass(frozen=True)
class SideEngine:
    """One replica of a side."""

    schedule: Schedule
    most_seq_s: float
    """Requests/s that it doesn't exceed."""

    @property
    def tp(self) -> int:
        """Its tensor-parallel degree."""
        return self.schedule.stages[0].tp


@dataclass(frozen=True)
class PrefillDecodeAnswer:
    """The best layout, and its figures at the asked rate."""

    plan: PrefillDecode
    goodput_seq_s: float
    estimate: Estimate
    transfer_s: float
    """Mean seconds from the end of a prefill to the start of its decoding."""
    layouts: int
    """The number of layouts that fit on the devices."""


@dataclass(frozen=True)
class PrefillDecodeQuestion:
    """A model on a cluster, and requests that arrive over time."""

    setting: Setting
    arrivals: Arrivals
    bounds: RateBounds
    bound: BoundMeaning

    @functools.cached_property
    def _replicas(self) -> Replicas:
        return Replicas(self.setting.profile)

    def best(self, rate_seq_s: float | None) -> PrefillDecodeAnswer | None:
        """Return the layout with the highest goodput and its figures at a rate (None: its goodput).

        Returns None if no layout keeps the bounds.

        Raises:
            InputError: As `check_divisible`.
        """
        check_divisible(self.setting)
        prefill = list(self._engines(only_prompts=True))
        decode = list(self._engines(only_prompts=False))
        ordered = sorted(self._layouts(prefill, decode), key=lambda found: -found[0])
        best, goodput = None, 0.0
        for most, plan in ordered:
            if most <= goodput * (1 + PRECISION):
                break
            least = max(goodput * (1 + PRECISION), PRECISION * most)
            if self._holds(plan, least):
                best, goodput = plan, self._goodput(plan, least, most)
        if best is None:
            return None
        estimate, transfer_s = self._figures(best, rate_seq_s or goodput)
        return PrefillDecodeAnswer(best, goodput, estimate, transfer_s, len(ordered))

    def _engines(self, only_prompts: bool) -> Iterator[SideEngine]:
        """Yield a replica of one side at each degree and budget: of the side for prompts, or of the other."""
        own = replica_layouts(self.setting, {})
        for layout in own:
            if layout.pp > 1 or layout.tp > self.setting.cluster.devices - 1:
                continue
            for budget in PREFILL_BUDGETS if only_prompts else (DECODE_BUDGET,):
                most = PREFILL_SEQUENCES if only_prompts else DECODE_SEQUENCES
                if made := self.engine(layout, budget, most, only_prompts):
                    yield SideEngine(made, ABOVE * self._waiting_rate(made, only_prompts))

    def engine(self, layout: ReplicaLayout, budget: int, sequences: int, only_prompts: bool) -> Schedule | None:
        """Return the schedule of a replica whose KV cache takes all the memory; None if it holds no request."""
        setting, fixed = self.setting, {"max_num_seqs": sequences, "max_num_batched_tokens": budget, "replicas": 1}
        workload = _prompts_of(setting.workload) if only_prompts else setting.workload
        where = setting.model, replace(layout.cluster(1), nodes=1, devices_per_node=layout.tp), workload
        problem = problem_at(*where, setting.profile, self.bounds, self.bound, setting.kv_dtype, fixed | layout.fixed)
        found = [space for space in all_spaces(spaces(POLICY, problem)) if isinstance(space, Candidates)]
        if not found:
            return None
        space = found[0]
        blocks = space.where.replica.room((float(budget), float(sequences)))
        if blocks < self.arrivals.most_blocks:
            return None
        made = schedule(space, space.values(space.lowest), problem.limits, Size(0.0, (0.0, 0.0), blocks, sequences))
        return replace(made, cluster=setting.cluster)

    def _waiting_rate(self, side: Schedule, only_prompts: bool) -> float:
        """Return the requests/s of a replica while requests wait."""
        requests = self._sampled(WAITING)
        waiting = replace(requests, arrivals=np.zeros_like(requests.arrivals))
        if only_prompts:
            waiting = replace(waiting, outputs=np.ones_like(waiting.outputs))
        else:
            waiting = replace(waiting, received=waiting.inputs - 1)
        served = self._replicas.serve(side, waiting)
        assert served is not None, "nothing is watched"
        return len(waiting.arrivals) / served.seconds

    def _layouts(
        self, prefill: Sequence[SideEngine], decode: Sequence[SideEngine]
    ) -> Iterator[tuple[float, PrefillDecode]]:
        """Yield each layout that leaves no room for another replica, with a rate that it does not exceed."""
        devices = self.setting.cluster.devices
        for p, d in itertools.product(prefill, decode):
            for x in range(1, (devices - d.tp) // p.tp + 1):
                y = (devices - x * p.tp) // d.tp
                plan = PrefillDecode(replace(p.schedule, replicas=x), replace(d.schedule, replicas=y))
                yield min(x * p.most_seq_s, y * d.most_seq_s), plan

    def _holds(self, plan: PrefillDecode, rate_seq_s: float) -> bool:
        """Return whether a plan keeps the bounds at a rate: misses stay below what they allow, by standard errors."""
        sample = self.arrivals.sample(TRIED, 1, self.bound)
        (requests,) = (at(replica, rate_seq_s) for replica in sample.replicas)
        times = self._replayed(plan, requests)
        missed = missed_bounds(requests, times.first, times.finished, self.bounds.limits)
        return excess_of([missed], sample.allowed, self.arrivals.random).likely <= 0

    def _goodput(self, plan: PrefillDecode, held: float, most: float) -> float:
        """Return the highest rate between one that holds and one that it doesn't exceed."""
        low, high = held, most
        while high > low * (1 + PRECISION):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._holds(plan, middle) else (low, middle)
        return low

    def _figures(self, plan: PrefillDecode, rate_seq_s: float) -> tuple[Estimate, float]:
        """Return the figures at a rate, without the warm-up, and the mean seconds of a transfer."""
        requests = at(self.arrivals.sample(TRIED, 1, self.bound).replicas[0], rate_seq_s)
        times, kept = self._replayed(plan, requests), requests.flags > 0
        known = requests.outputs[kept], requests.arrivals[kept]
        columns = RequestTimesColumns(*known, times.started[kept], times.first[kept], times.finished[kept])
        seconds = float(columns.finish_s.max() - columns.arrival_s.min())
        estimate = summarise_columns(columns, seconds, self.bound, utilisation=self._busy(plan, times))
        waits: Array = (times.ready - times.prefilled)[kept]
        return replace(estimate, latency_from="arrival"), float(waits.mean())

    def _busy(self, plan: PrefillDecode, times: HandedOver) -> tuple[float, ...]:
        """Return the busy fractions by device: the prefill replicas' first."""
        sides = zip((plan.prefill, plan.decode), times.busy, strict=True)
        return tuple(busy for side, busy in sides for _ in range(side.replicas * side.stages[0].tp))

    def _replayed(self, plan: PrefillDecode, requests: RequestArrays) -> HandedOver:
        return hand_over(plan, self.setting.profile, self._replicas, requests)

    def _sampled(self, count: int) -> RequestArrays:
        return self.arrivals.sample(count, 1, self.bound).replicas[0]


def _prompts_of(workload: Workload) -> Workload:
    """Return a workload's prompts with outputs of one token."""
    return workload.with_outputs(LengthDistribution.fixed(1))
