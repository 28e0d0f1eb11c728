"""Models on devices that they share: where they are placed, and their requests in simulated time."""
