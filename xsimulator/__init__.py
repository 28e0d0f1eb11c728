"""XSimulator: what a schedule will give (paper section 4; spec sections 3 to 5)."""

from xsimulator.estimates import estimate, timeline

__all__ = ["estimate", "timeline"]
