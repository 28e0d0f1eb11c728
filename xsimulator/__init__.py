"""XSimulator: predicts the throughput, latency and memory of a schedule (paper section 6; docs/theory.md)."""

from xsimulator.estimates import estimate, has_steady_state, timeline

__all__ = ["estimate", "has_steady_state", "timeline"]
