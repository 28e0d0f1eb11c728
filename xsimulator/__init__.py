"""XSimulator: what a schedule will give (paper section 6; docs/theory.md)."""

from xsimulator.estimates import estimate, has_steady_state, timeline

__all__ = ["estimate", "has_steady_state", "timeline"]
