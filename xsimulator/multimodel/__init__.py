"""Several models on shared devices in simulated time."""
