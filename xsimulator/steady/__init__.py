"""Steady state, memory and latency of each policy in closed form, from its control variables and a scenario."""
