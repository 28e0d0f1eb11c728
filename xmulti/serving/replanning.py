"""Replanning: a server with a plan searches for another one when its models' popularity has drifted."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter

from xcore.console import output
from xcore.document import to_dict
from xcore.errors import InputError
from xcore.quantity import figure_text
from xcore.specs.cluster_plan import Plan
from xmulti.serving.popularity import Popularity
from xmulti.serving.replan import ReplanInput, Replanned, Watched, in_a_process, next_interval_s, why_not_watched
from xserver.http.frontend import Frontend

LOOK_S = 1.0
"""Seconds between two checks of the arrivals."""
_READY_S = 0.1

Outcome = Literal["followed", "kept", "failed"]


@dataclass(frozen=True)
class ReplanOptions:
    """How the plan follows popularity."""

    after_s: float
    """How long the rates must have differed."""


class Replanning:
    """Replans the models of a plan, by name.

    `options` None: the plan stays. `follow` switches the models to another plan; it raises InputError for a plan that
    this machine can't run.
    """

    def __init__(
        self,
        frontends: Mapping[str, Frontend],
        plan: Plan,
        follow: Callable[[Plan], None],
        registry: CollectorRegistry,
        options: ReplanOptions | None,
    ):
        self._frontends, self._options, self._follow = frontends, options, follow
        self.plan = plan
        """The current plan."""
        self._interval_s: float | None = None
        """Minimum time that the plan stays after a search; None before the first."""
        self._popularity: Popularity | None = None
        self._seen: dict[str, int] = {}
        self._since_s = time.monotonic()
        """When the current plan took over."""
        self._last: str | None = None
        self._counted: dict[str, int] = dict.fromkeys(get_args(Outcome), 0)
        self._counter = Counter(
            "exegpt_replans", "Searches for another plan, as popularity had drifted.", ["outcome"], registry=registry
        )
        for outcome in self._counted:
            self._counter.labels(outcome)

    def follows(self, plan: Plan) -> None:
        """Record that the models follow another plan from now on."""
        self.plan, self._since_s = plan, time.monotonic()
        self._watch({model.name: model.rate_seq_s for model in plan.models}, self._since_s)

    def goes_back(self, plan: Plan, why: str) -> None:
        """Record that the models return to an earlier plan.

        Popularity isn't watched any more, since the search would find the failed plan again. An administrator has to
        send another plan.
        """
        self.plan, self._since_s, self._popularity = plan, time.monotonic(), None
        self._count("failed", f"the server returns to the earlier plan and keeps it: {why}")

    @property
    def state(self) -> dict[str, object]:
        """The answer of `GET /plan`."""
        watched = self._popularity
        return {
            "plan": to_dict(self.plan),
            "watched_seq_s": dict(watched.planned) if watched else None,
            "replans": dict(self._counted),
            "last": self._last,
        }

    async def run(self) -> None:
        """Watch until cancelled; after an unexpected error the server continues with its plan."""
        if self._options is None:
            return
        self.follows(self.plan)
        try:
            await self._watch_for_good()
        except Exception as error:
            self._popularity = None
            self._count("failed", f"popularity is no longer watched: {type(error).__name__}: {error}")

    async def _watch_for_good(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            rates = self._look(time.monotonic())
            if rates:
                await self._replan(rates)

    def _watch(self, rates: dict[str, float | None], begin_s: float) -> None:
        """Watch for rates that differ from these, if another plan can be searched."""
        if self._options is None:
            return
        if why := why_not_watched(self.plan):
            self._popularity = None
            output.note(f"the plan does not follow changes of popularity: {why}", event="plan")
            return
        known = {name: rate for name, rate in rates.items() if rate}
        self._popularity = Popularity(known, self._options.after_s, begin_s)

    @property
    def _ready(self) -> bool:
        return all(frontend.admission and not frontend.draining for frontend in self._frontends.values())

    def _look(self, now_s: float) -> dict[str, float] | None:
        """Return the arrival rates, if they have drifted."""
        arrived = {name: frontend.arrived for name, frontend in self._frontends.items()}
        counts = {name: count - self._seen.get(name, 0) for name, count in arrived.items()}
        self._seen = arrived
        if self._popularity is None:
            return None
        if not self._ready:
            self._popularity.pause(now_s)  # requests are refused before they are counted
            return None
        return self._popularity.come(counts, now_s)

    async def _replan(self, rates: dict[str, float]) -> None:
        """Search a plan for these rates, and switch to it if it is better."""
        since_s = self._since_s
        asked = ", ".join(f"{name} {figure_text(rate)}/s" for name, rate in rates.items())
        output.note(f"popularity has changed to {asked}: searching for another plan", event="replan")
        found = await self._search(rates)
        while not self._ready:
            await asyncio.sleep(_READY_S)
        if self._since_s != since_s:  # an administrator has sent another one meanwhile, which may have failed since
            return
        self._interval_s = next_interval_s(self._interval_s, found.error)
        begin_s = time.monotonic() + self._interval_s
        if found.plan and not (refused := self._refused(found.plan)):
            self._watch({model.name: model.rate_seq_s for model in found.plan.models}, begin_s)
            self._count("followed", f"the server switches to another plan: {found.why}")
            return
        self._watch(dict(rates), begin_s)  # these rates have had their search
        failed = found.failed or found.plan is not None
        why = refused if found.plan else found.why
        self._count("failed" if failed else "kept", f"the models keep their plan: {why}")

    def _refused(self, plan: Plan) -> str:
        """Switch to a plan. Return why it can't be followed, or an empty text."""
        try:
            self._follow(plan)
        except InputError as error:
            return str(error)
        return ""

    def _count(self, outcome: Outcome, text: str) -> None:
        self._last = text
        self._counted[outcome] += 1
        self._counter.labels(outcome).inc()
        output.note(text, event="replan", outcome=outcome)

    async def _search(self, rates: dict[str, float]) -> Replanned:
        watched = []
        for name, frontend in self._frontends.items():
            opened = frontend.link.opened
            if opened is None:
                return Replanned(None, f"the engine of {name} was lost before the search", failed=True)
            latencies_s = frontend.monitor.observed.latencies_s(self._since_s)
            watched.append(Watched(name, rates[name], opened.profile, opened.schedule.workload, latencies_s))
        try:
            return await in_a_process(ReplanInput(self.plan, tuple(watched)))
        except (OSError, InputError) as error:
            return Replanned(None, str(error), failed=True)
