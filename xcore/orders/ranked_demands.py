"""Demands of applications with their Gittins ranks, by what has been observed of a run."""

from collections.abc import Mapping

from xcore.applications.demand import ApplicationDemand, DemandSamples, Seen, ServiceRates
from xcore.orders.gittins import BUCKETS, RankedDemand

Ranked = tuple[RankedDemand, RankedDemand]
"""A demand with parallel requests summed, and the same for the longest of them only."""


class RankedDemands:
    """The ranked demands of several applications; equal observations give the same objects."""

    def __init__(self, models: Mapping[str, ApplicationDemand], refine: bool = True, buckets: int = BUCKETS):
        """Set up the demands; `models` are by the application's name. Without `refine`, runs' calls change nothing."""
        self.models = models
        self.refine = refine
        self._buckets = buckets
        self._ranked: dict[int, tuple[DemandSamples, Ranked]] = {}
        """By the identity of the samples, which are kept, so that no other samples get it."""

    @property
    def rates(self) -> ServiceRates:
        """The service rates of all demands."""
        return next((model.rates for model in self.models.values()), ServiceRates())

    def has(self, application: str, unit: str) -> bool:
        """Return whether the application's demand graph has this unit."""
        return application in self.models and self.models[application].has(unit)

    def prior(self, application: str) -> Ranked:
        """Return the demand of a whole run."""
        return self._of(self.models[application].prior)

    def refined(self, application: str, unit: str, seen: Seen | None) -> Ranked:
        """Return the demand from a call of `unit` on; `seen` is the run's last LLM call before it."""
        return self._of(self.models[application].refined(unit, seen))

    def _of(self, samples: DemandSamples) -> Ranked:
        if id(samples) not in self._ranked:
            total, longest = (RankedDemand(each.tolist(), self._buckets) for each in samples)
            self._ranked[id(samples)] = samples, (total, longest)
        return self._ranked[id(samples)][1]
