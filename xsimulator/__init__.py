"""XSimulator: what a schedule will give (paper section 6; docs/theory.md)."""

from xsimulator.estimates import estimate, timeline

__all__ = ["estimate", "timeline"]
