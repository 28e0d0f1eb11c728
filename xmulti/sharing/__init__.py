"""Models on shared devices: placement, and replays of their requests."""
