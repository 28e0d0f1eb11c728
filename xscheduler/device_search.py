"""Find how many devices of which kind sustain a rate: the cheapest replicas, over kinds, TP, PP, EP and attention DP.

Each layout of a replica has a lower bound on its price: that of the replicas which it needs if each serves as much as
its fluid rate, or its steady throughput. Layouts are measured in the order of these bounds, until no other can be
cheaper.
"""

import heapq
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from xcore.policies import TRAITS
from xscheduler.allocation import Layout
from xscheduler.fluid_rate import fluid_rate
from xscheduler.goodput import BEYOND
from xscheduler.open_searches import problem_at, thread_count
from xscheduler.replica_layout import DevicesNeeded, RateQuestion, ReplicaLayout, least
from xscheduler.replicas_needed import needed_drafting, searches_of
from xscheduler.tune import tune, uncollected

ABOVE = 1.06
"""Factor from a fluid rate to a rate that no replica exceeds."""

LIKELY = 0.65
"""Share of that rate which most replicas sustain; a few sustain less each than many."""


@dataclass(frozen=True)
class Option:
    """A layout, with what is known of the replicas that it needs."""

    layout: ReplicaLayout
    most: float
    """Requests/s that no replica exceeds."""
    steady: bool
    """Whether `most` follows from the steady state, not only from a fluid rate."""
    needed: DevicesNeeded | None = None
    """The measured replicas; None: not measured yet."""

    def fewest(self, asked: RateQuestion) -> int:
        """Return the measured number of replicas, or the smallest possible one."""
        return self.needed.replicas if self.needed else least(asked.rate_seq_s, self.most)

    def order(self, asked: RateQuestion) -> tuple[float, ...]:
        """Return the sort key of the measured replicas, or of the fewest possible."""
        return asked.order(self.layout, self.fewest(asked))


def options_of(layouts: Sequence[ReplicaLayout], asked: RateQuestion) -> list[Option]:
    """Return the layouts that serve any request within the bounds, with a bound on what a replica serves.

    The fluid rate is that of policies that prefill and decode in one iteration; for others it is the ceiling of their
    spaces. These, and pipelines, whose bubbles a fluid rate ignores, get a steady state too before they are measured.
    """
    mixed = all(TRAITS[policy].mixed for policy in asked.search.policies)

    def most(layout: ReplicaLayout) -> float:
        return ABOVE * _fluid_rate(layout, asked) if mixed else _ceiling(layout, asked)

    options: list[Option] = []
    for place in layouts:
        like = options[-1].layout if options else place  # its number of draft tokens is near the best one
        layout, rate = _with_drafts(place, asked, most, like.drafted)
        if rate > 0:
            options.append(Option(layout, rate, mixed and layout.pp == 1))
    return options


def _with_drafts(
    layout: ReplicaLayout, asked: RateQuestion, rate: Callable[[ReplicaLayout], float], usual: int
) -> tuple[ReplicaLayout, float]:
    """Return the layout with the number of draft tokens at which `rate` is highest, and that rate.

    The search climbs from the number next to `usual`.
    """
    drafts = asked.drafts
    if drafts is None:
        return layout, rate(layout)
    best, highest = drafts.best(lambda drafted, _: rate(layout.drafting(drafts.at(drafted))), usual)
    return layout.drafting(drafts.at(best)), highest


def _ceiling(layout: ReplicaLayout, asked: RateQuestion) -> float:
    ceilings = [space.ceiling for search in searches_of(layout, 1, asked) for space in search.members]
    return max(ceilings, default=0.0) / layout.setting.workload.output.mean


def _fluid_rate(layout: ReplicaLayout, asked: RateQuestion) -> float:
    setting, search = layout.setting, asked.search
    where = (setting.model, layout.cluster(1), asked.computed(layout), setting.profile)
    fixed = layout.fixed(1)
    problem = problem_at(
        *where, asked.bounds, search.bound, setting.kv_dtype, fixed, search.admission, setting.speculation
    )
    devices = layout.devices // layout.shared
    stages = Layout(devices, layout.tp, devices if layout.tp > 1 else 0)
    return layout.shared * fluid_rate(problem, stages, asked.bounds.tpot_s)


def _steady_rate(layout: ReplicaLayout, asked: RateQuestion) -> float:
    """Return the requests/s of a replica whose requests always wait."""
    setting, search = layout.setting, asked.search
    tuned = tune(
        setting.model,
        layout.cluster(1),
        asked.computed(layout),
        setting.profile,
        latency_bound_s=asked.bounds.latency_s,
        bound=search.bound,
        tpot_s=asked.bounds.tpot_s,
        policies=search.policies,
        kv_dtype=setting.kv_dtype,
        fixed=search.fixed | layout.fixed(1),
        own=setting.own,
        admission=search.admission,
        floor=0.0,
        speculation=setting.speculation,
    )
    return tuned.estimate.throughput_seq_s if tuned.estimate else 0.0


def _likely(options: Sequence[Option], asked: RateQuestion) -> tuple[int, Option] | None:
    """Return the option without a pipeline that will probably cost least, with its place; None if there is none."""
    places = [(place, option) for place, option in enumerate(options) if option.steady]
    fewest = {place: least(asked.rate_seq_s, LIKELY * option.most) for place, option in places}
    return min(places, key=lambda one: asked.order(one[1].layout, fewest[one[0]]), default=None)


def cheapest(
    options: Sequence[Option],
    asked: RateQuestion,
    top: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[DevicesNeeded], list[Option]]:
    """Return the `top` layouts that sustain the rate at the lowest price, the best first, and the options left.

    Without prices the fewest devices count. The options left are in the order of what they cost at least.
    `progress` is called with the numbers of answers and of asked answers.
    """
    queue = [(option.order(asked), place, option) for place, option in enumerate(options)]
    heapq.heapify(queue)
    best: list[DevicesNeeded] = []
    measured: list[tuple[float, ...]] = []  # of all measured options, while others are being measured

    def known_better(option: Option) -> Option | None:
        """Return an option with its steady state, or measured if it has one; None if it can't be an answer."""
        if not option.steady:
            usual = option.layout.drafted
            layout, rate = _with_drafts(option.layout, asked, lambda layout: _steady_rate(layout, asked), usual)
            most = min(option.most, BEYOND * rate)
            return replace(option, layout=layout, most=most, steady=True) if most > 0 else None

        def hopeless(replicas: int) -> bool:
            return len(measured) >= top and asked.order(option.layout, replicas) > sorted(measured)[top - 1]

        needed = needed_drafting(option.layout, option.most, asked, hopeless)
        if isinstance(needed, int):  # it stays behind the best
            return replace(option, most=asked.rate_seq_s / needed)
        if needed:
            measured.append(asked.order(option.layout, needed.replicas))
        return replace(option, needed=needed) if needed else None

    at_a_time, likely = thread_count(), _likely(options, asked)
    with uncollected(), ThreadPoolExecutor(at_a_time) as threads:
        while queue and len(best) < top:
            progress(len(best), top)
            if needed := queue[0][2].needed:
                heapq.heappop(queue)
                best.append(needed)
                continue
            taken: list[tuple[int, Option]] = []
            if likely is not None:  # its measurement lets others be given up early
                taken, likely = [likely], None
                queue = [entry for entry in queue if entry[1] != taken[0][0]]
                heapq.heapify(queue)
            while queue and not queue[0][2].needed and len(taken) < at_a_time:
                taken.append(heapq.heappop(queue)[1:])
            known = threads.map(known_better, [option for _, option in taken])
            for (place, _), option in zip(taken, known, strict=True):
                if option:
                    heapq.heappush(queue, (option.order(asked), place, option))
    return best, [option for _, _, option in sorted(queue, key=lambda entry: entry[:2])]
