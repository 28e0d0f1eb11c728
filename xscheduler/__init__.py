"""XScheduler: find the schedule with the highest throughput under a latency bound (paper section 5; docs/theory.md)."""
