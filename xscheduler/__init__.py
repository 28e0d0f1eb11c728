"""XScheduler: the schedule with the highest throughput under a latency bound (paper section 5; spec section 6)."""
