"""The event simulator: runs request lists through a policy's own decisions, in Python or, without a timeline, in C."""
