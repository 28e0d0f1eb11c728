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
from xcore.specs.request_times import RequestTimesColumns, most_together, summarise_columns
from xcore.specs.schedule import Schedule
from xcore.specs.workload import LengthDistribution, Workload
from xscheduler.candidates import Candidates, Size, schedule
from xscheduler.goodput import PRECISION, RateBounds, excess_of, missed_bounds
from xscheduler.open_searches import problem_at
from xscheduler.rate_sample import REQUESTS, Arrivals, at
from xscheduler.replica_layout import ReplicaLayout, replica_layouts
from xscheduler.settings import Setting
from xscheduler.space import all_spaces
from xscheduler.spaces import spaces
from xsimulator.replay.compiled import Replicas, RequestArrays
from xsimulator.replay.prefill_decode_replay import HandedOver, KVLink, hand_over
from xsimulator.replay.watch import Watch

POLICY = TRAITS.name
"""The policy of both sides: iteration-level scheduling within a token budget, as in vLLM and SGLang."""
PREFILL_SEQUENCES, DECODE_SEQUENCES = 256, 1024
"""Sequences at a time of a replica of each side, at most; memory may hold fewer."""
PREFILL_BUDGETS, DECODE_BUDGET = (2048, 8192), 2048
"""Tokens per iteration of each side."""
TRIED, EACH = 20_000, 1_000
"""Requests with which layouts are compared, and fewest for each replica.

The best are measured with `REQUESTS`, as other schedules are, so that their goodputs can be compared.
"""
WAITING, WAVES, MOST_WAITING = 4_000, 12, 60_000
"""Requests that wait to measure what a replica serves: so many, or so many times those it runs at a time; the most."""


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
    """Mean seconds from the end of a prefill until the decode replica has its keys and values."""
    rate_seq_s: float
    """The rate of the estimate: the asked one if the layout sustains it, else its goodput."""


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

        Returns None if no layout keeps the bounds, or if there is none.

        Raises:
            InputError: As `check_divisible`.
        """
        check_divisible(self.setting)
        leads, reached = list[tuple[float, PrefillDecode]](), 0.0
        for most, plan in self.layouts:
            if most <= reached * (1 + PRECISION):
                break
            least = max(reached * (1 + PRECISION), PRECISION * most)
            if self._holds(plan, least, TRIED):
                reached = self._goodput(plan, least, most, TRIED)
                leads.append((reached, plan))
        best, goodput = None, 0.0
        for tried, plan in reversed(leads):  # with more requests, a queue that grows slowly is seen
            if tried > goodput and (measured := self._goodput(plan, goodput, tried, REQUESTS)) > goodput:
                best, goodput = plan, measured
        if best is None:
            return None
        rate = goodput if rate_seq_s is None else min(rate_seq_s, goodput)
        return PrefillDecodeAnswer(best, goodput, *self._figures(best, rate), rate)

    @functools.cached_property
    def layouts(self) -> list[tuple[float, PrefillDecode]]:
        """The layouts that fit on the cluster, each with a rate that it doesn't exceed, the highest first."""
        prefill = list(self._engines(only_prompts=True))
        decode = list(self._engines(only_prompts=False))
        return sorted(self._layouts(prefill, decode), key=lambda layout: -layout[0])

    def _engines(self, only_prompts: bool) -> Iterator[SideEngine]:
        """Yield a replica of one side at each degree and budget: of the side for prompts, or of the other."""
        for layout in replica_layouts(self.setting, {}):
            if layout.pp > 1 or layout.tp > self.setting.cluster.devices_per_node:
                continue
            for budget in PREFILL_BUDGETS if only_prompts else (DECODE_BUDGET,):
                most = PREFILL_SEQUENCES if only_prompts else DECODE_SEQUENCES
                if side := self.engine(layout, budget, most, only_prompts):
                    yield SideEngine(side, self._waiting_rate(side, only_prompts))

    def engine(self, layout: ReplicaLayout, budget: int, sequences: int, only_prompts: bool) -> Schedule | None:
        """Return the schedule of a replica whose KV cache takes all the memory; None if it holds no request."""
        setting, fixed = self.setting, {"max_num_seqs": sequences, "max_num_batched_tokens": budget, "replicas": 1}
        workload = _prompts_of(setting.workload) if only_prompts else setting.workload
        where = setting.model, replace(layout.cluster(1), nodes=1, devices_per_node=layout.tp), workload
        problem = problem_at(
            *where, setting.profile, self.bounds, self.bound, setting.kv_dtype, fixed | layout.fixed(1)
        )
        members = all_spaces(spaces(POLICY, problem))
        space = next((space for space in members if isinstance(space, Candidates)), None)
        if space is None:
            return None
        blocks = space.where.replica.room((float(budget), float(sequences)))
        if blocks < self.arrivals.most_blocks:
            return None
        size = Size(0.0, (0.0, 0.0), blocks, sequences)
        side = schedule(space, space.values(space.lowest), problem.limits, size)
        return replace(side, cluster=setting.cluster)

    def _waiting_rate(self, side: Schedule, only_prompts: bool) -> float:
        """Return the requests/s of a replica while requests wait: after its first sequences, before it drains."""
        count = min(WAITING, self.arrivals.count)
        while True:
            requests = _first(self.arrivals, count)
            if only_prompts:
                requests = replace(requests, outputs=np.ones_like(requests.outputs))
            else:
                requests = replace(requests, received=requests.inputs - 1)
            served = self._replicas.serve(side, requests)
            assert served is not None, "nothing is watched"
            together = most_together(served.started, served.finished)
            enough = min(WAVES * together, MOST_WAITING, self.arrivals.count)
            if count >= enough:
                break
            count = enough
        ended = np.sort(served.finished)
        first, last = float(ended[min(together, count) - 1]), float(served.started.max())
        if last <= first:  # fewer requests than the replica holds
            return count / served.seconds
        return float(np.searchsorted(ended, last, side="right") - together) / (last - first)

    def _layouts(
        self, prefill: Sequence[SideEngine], decode: Sequence[SideEngine]
    ) -> Iterator[tuple[float, PrefillDecode]]:
        """Yield each layout without room for another decode replica, with a rate that it does not exceed."""
        cluster, profile = self.setting.cluster, self.setting.profile
        for p, d in itertools.product(prefill, decode):
            for x in range(1, (cluster.devices - d.tp) // p.tp + 1):
                at_most = (cluster.devices - x * p.tp) // d.tp
                plans = (
                    PrefillDecode(replace(p.schedule, replicas=x), replace(d.schedule, replicas=y))
                    for y in range(at_most, 0, -1)
                )
                plan = next((plan for plan in plans if plan.fits(cluster.nodes, cluster.devices_per_node)), None)
                if plan is None:
                    continue
                y = plan.decode.replicas
                sent_s = float(KVLink.of(plan, profile).transfer(self.arrivals.inputs[:WAITING]).mean())
                links = min(x, y) / sent_s if sent_s else math.inf
                yield min(x * p.most_seq_s, y * d.most_seq_s, links), plan

    def _holds(self, plan: PrefillDecode, rate_seq_s: float, count: int) -> bool:
        """Return whether a plan keeps the bounds at a rate: misses stay below what they allow, by standard errors."""
        sample = self.arrivals.sample(self._count(plan, count), 1, self.bound)
        (requests,) = (at(replica, rate_seq_s) for replica in sample.replicas)
        watch = Watch(self.bounds.limits, sample.allowed, np.zeros(3))
        times = hand_over(plan, self.setting.profile, self._replicas, requests, watch)
        if times is None:
            return False
        missed = missed_bounds(requests, times.first, times.finished, self.bounds.limits)
        return excess_of([missed], sample.allowed, self.arrivals.random).likely <= 0

    def _count(self, plan: PrefillDecode, count: int) -> int:
        """Return the requests to replay: enough for each replica of a side."""
        return max(count, EACH * max(plan.prefill.replicas, plan.decode.replicas))

    def _goodput(self, plan: PrefillDecode, held: float, most: float, count: int) -> float:
        """Return the highest rate between one that holds, or 0, and one that it doesn't exceed."""
        if self._holds(plan, most, count):
            return most
        low, high = held, most
        while high > low * (1 + PRECISION) and high > PRECISION * most:
            middle = math.sqrt(max(low, high / 16) * high)
            low, high = (middle, high) if self._holds(plan, middle, count) else (low, middle)
        return low

    def _figures(self, plan: PrefillDecode, rate_seq_s: float) -> tuple[Estimate, float]:
        """Return the figures at a rate, without the warm-up, and the mean seconds of a transfer."""
        count = self._count(plan, REQUESTS)
        requests = at(self.arrivals.sample(count, 1, self.bound).replicas[0], rate_seq_s)
        times, kept = hand_over(plan, self.setting.profile, self._replicas, requests), requests.flags > 0
        assert times is not None, "nothing is watched"
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


def _first(arrivals: Arrivals, count: int) -> RequestArrays:
    """Return the first requests, all of them waiting from the start."""
    start = np.zeros(count)
    return RequestArrays(start, arrivals.inputs[:count], arrivals.outputs[:count], start)


def _prompts_of(workload: Workload) -> Workload:
    """Return a workload's prompts with outputs of one token."""
    return workload.with_outputs(LengthDistribution.fixed(1))
