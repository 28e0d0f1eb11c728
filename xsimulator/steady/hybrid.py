"""Hybrid static batches (DeepSpeed-Inference): static batches with micro-batches of two sizes."""

from xcore.policies.hybrid import TRAITS
from xsimulator.steady.closed_form import ClosedForm, Steady
from xsimulator.steady.scenario import Scenario
from xsimulator.steady.static import outcome


def _steady(scenario: Scenario) -> Steady:
    return lambda controls: outcome(
        scenario, controls["encode_batch"], controls.get("encode_micro_batches"), controls.get("micro_batches")
    )


CLOSED_FORM = ClosedForm((TRAITS.name,), _steady)
