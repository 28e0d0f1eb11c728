"""Hybrid static batches (DeepSpeed-Inference): static batches with micro-batches of two sizes."""

from xcore.policies.hybrid import TRAITS
from xsimulator.steady.closed_form import ClosedForm, Controls, Steady
from xsimulator.steady.outcome import Needs
from xsimulator.steady.scenario import Scenario
from xsimulator.steady.static import needs, outcome


def _variables(controls: Controls) -> tuple[int, int | None, int | None]:
    return controls["encode_batch"], controls.get("encode_micro_batches"), controls.get("micro_batches")


def _steady(scenario: Scenario) -> Steady:
    return lambda controls: outcome(scenario, *_variables(controls))


def _needs(scenario: Scenario, controls: Controls) -> Needs:
    return needs(scenario, *_variables(controls))


CLOSED_FORM = ClosedForm((TRAITS.name,), _steady, needs=_needs)
