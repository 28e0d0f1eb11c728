"""The event simulator: request lists through a policy's own decisions, as Python and, without a timeline, as C."""
