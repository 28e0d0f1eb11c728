"""Shared by all packages: specs, traces, requests, batching, policies and orders. Without torch and without a clock."""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    # GNU's OpenMP, which torch loads, lets threads that wait for each other spin for milliseconds. Where another
    # process has one of their cores they burn the time in which it could have ended its turn: decoder layers over 64
    # tokens then took 12 times as long, and take 3 times as long if they give up after some 30 µs. On a quiet machine
    # there is no difference.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__version__ = "0.1.0"
