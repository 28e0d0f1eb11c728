"""Whether models that share devices can keep their latency bounds."""

import math
from collections.abc import Mapping, Sequence

from xcore.duration import duration_text
from xcore.errors import Infeasible
from xcore.specs.cluster_plan import PlannedModel
from xcore.specs.profile import Profile
from xmulti.sharing.unit_continuation import UnitContinuation
from xserver.admission.admission_control import MARGIN
from xserver.admission.lengths import QUANTILE
from xsimulator.replay.continuation import Standing


def keeps_bounds(unit: Sequence[PlannedModel]) -> bool:
    """Return whether a server keeps latency bounds of a unit's models: they share devices and take turns."""
    in_turn = len(unit) > 1 and all(model.share is not None and model.share.by == "time" for model in unit)
    return in_turn and any(model.schedule.latency_bound_s is not None for model in unit)


def check_bounds(unit: Sequence[PlannedModel], profiles: Mapping[str, Profile]) -> None:
    """Check that each model's bound can be kept on this machine, at least for a request alone.

    The request has a mean prompt, and an output that 99 of 100 requests stay below.

    Raises:
        Infeasible: Even that request takes longer than the bound less admission control's margin.
    """
    continuation = UnitContinuation(unit, profiles)
    for model in unit:
        bound_s, lengths = model.schedule.latency_bound_s, model.schedule.workload
        if bound_s is None:
            continue
        tokens = lengths.output.quantile(QUANTILE)
        alone = Standing(max(1, round(lengths.input.mean)), tokens, tokens)
        (ran,) = continuation.run({model.name: [alone]}, math.inf)[model.name]
        assert ran.finish_s is not None, "nothing else runs"
        if ran.finish_s > (1 - MARGIN) * bound_s:
            raise Infeasible(
                f"Model '{model.name}' can't keep its latency bound of {duration_text(bound_s)}: on this machine a "
                f"request with {tokens:,} output tokens takes {duration_text(ran.finish_s)} even alone, and "
                f"{QUANTILE:.0%} of outputs are at most as long. Plan again with a longer bound or other devices.",
                ran.finish_s,
            )
