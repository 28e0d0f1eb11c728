"""Shared by all packages: specs, traces, requests, batching, policies and orders. Without torch and without a clock."""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    # GNU's OpenMP, which torch loads, lets threads that wait for each other spin for milliseconds. If another process
    # uses one of their cores, they burn the time in which that process could have ended its turn. Decoder layers over
    # 64 tokens then took 12 times as long; they take 3 times as long if threads give up after some 30 µs. On an idle
    # machine there is no difference.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__version__ = "0.1.0"
