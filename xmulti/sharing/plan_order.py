"""PlanOrder: an order of requests on all engines of a plan, which takes the place of the method's own."""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from xcore.batching import UNKNOWN, Hints, Order
from xcore.errors import InputError
from xcore.orders import fcfs
from xcore.orders.noise import noisy_scores
from xcore.orders.scored_length import ScoredLength
from xcore.orders.shortest import SJF
from xcore.specs.cluster_plan import PlannedModel
from xcore.specs.workload import RequestLengths
from xscheduler.ordering import USUAL_TAU

REPLAYED = ("fcfs", "sjf", "learned")
"""Orders that replays of a plan follow."""
RUN = ("fcfs", "learned")
"""Orders that a plan's engines follow: they know only prompts."""


@dataclass(frozen=True)
class PlanOrder:
    """An order by which requests are served within a model, and compared between models that share devices."""

    name: str
    """One of `REPLAYED`."""
    scores: Mapping[str, Items[float]] = field(default_factory=dict)
    """Rankers' scores of each model's requests, in the order of the requests; for replays under the learned order."""
    reference: Mapping[str, Items[float]] = field(default_factory=dict)
    """Scores of other prompts by model, with which scores are compared; for the learned order."""

    def of(self, model: PlannedModel) -> Order:
        """Return a model's order, whose keys are comparable with those of the plan's other models."""
        if self.name == "fcfs":
            return fcfs
        if self.name == "sjf":
            return SJF()
        return ScoredLength(model.name, self.reference[model.name], model.schedule.workload.output)

    def hints(self, model: str, requests: Items[RequestLengths]) -> tuple[Hints, ...]:
        """Return the hints on a model's requests, in a replay."""
        if self.name == "fcfs":
            return (UNKNOWN,) * len(requests)
        if self.name == "sjf":
            return tuple(Hints(output_tokens=request.output) for request in requests)
        return tuple(Hints(score=score) for score in self.scores[model]) if requests else ()


def check_order(name: str | None, known: tuple[str, ...]) -> str | None:
    """Return the name of a plan's order; InputError unless it is one of the `known` names, or None."""
    if name is not None and name not in known:
        raise InputError(
            f"--order {name} does not order the requests of a plan here: use one of {', '.join(known)}, or leave it "
            "out for the order of the plan's method."
        )
    return name


def replayed_order(
    name: str | None, tau: float | None, requests: Mapping[str, Items[RequestLengths]]
) -> PlanOrder | None:
    """Return the order of a replay; None for the order of the plan's method.

    The rankers of a learned order are simulated. Each score is compared with the scores of all its model's `requests`.

    Raises:
        InputError: There is no such order, or it has no ranker whose Kendall's tau is `tau`.
    """
    check_order(name, REPLAYED)
    if tau is not None and name != "learned":
        followed = name or "that of the plan's method"
        raise InputError(
            f"--ranker-tau {tau:g} is only for --order learned, but the order is {followed}: leave it out."
        )
    if name != "learned":
        return PlanOrder(name) if name else None
    scores = {
        model: noisy_scores([request.output for request in rows], tau or USUAL_TAU, seed).tolist()
        for seed, (model, rows) in enumerate(requests.items())
    }
    return PlanOrder(name, scores, scores)
