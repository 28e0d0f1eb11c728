"""The machine's present speed, relative to its profile."""

from typing import TYPE_CHECKING

from xcore.specs.profile import Profile

if TYPE_CHECKING:
    from xcore.requests.engine_protocol import Speed
    from xcore.specs.slowdown import Slowdown
    from xrunner.comm.ranks import Ranks
    from xrunner.core.engine import Engine
    from xrunner.models import Model


def slowdown_now(profile: Profile, model: "Model", ranks: "Ranks") -> "Slowdown | None":
    """Measure the slowdown since the profile; None if this machine didn't measure the profile.

    All ranks call it.
    """
    from xprofiler import machine
    from xprofiler.rates import measured_slowdown

    fact = "device" if model.device.type == "cuda" else "processor"
    same = profile.source == "measured" and profile.provenance.get(fact) == machine.provenance(model.device)[fact]
    return measured_slowdown(profile, model, ranks) if all(ranks.all(same)) else None


def speed_now(profile: Profile, engine: "Engine", ranks: "Ranks") -> "Speed | None":
    """Return the engine's profile scaled to the present speed; None if this machine didn't measure it.

    All ranks call it.
    """
    from xcore.requests.engine_protocol import Speed
    from xprofiler.rates import rescaled

    slowdown = slowdown_now(profile, engine.model, ranks)
    return Speed(rescaled(profile, engine.model.spec, slowdown)) if slowdown else None
