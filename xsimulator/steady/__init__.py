"""Steady state, memory and latency in closed form, one file per policy: control variables and a scenario in."""
