"""Which requests are accepted: the rate that an engine sustains, and what waits."""
