"""exegpt: serve large language models at the highest throughput a latency bound allows.

This package holds the nouns (one file each) and the doors to everything else; it imports nothing heavy.
"""

import os
from importlib import import_module

if "OMP_WAIT_POLICY" not in os.environ:
    # GNU's OpenMP, which torch loads, lets threads that wait for each other spin for milliseconds. Where another
    # process has one of their cores they burn the time in which it could have ended its turn: decoder layers over 64
    # tokens then took 12 times as long, and take 3 times as long if they give up after some 30 µs. On a quiet machine
    # there is no difference.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__version__ = "0.1.0"

_OFFERED = {
    "tune": "exegpt.app.library",
    "simulate": "exegpt.app.library",
    "plan": "exegpt.app.library",
    "Workload": "exegpt.workload",
}
"""What the package offers by itself, imported when it is asked for: `import exegpt` stays quick."""


def __getattr__(name: str) -> object:
    if name not in _OFFERED:
        raise AttributeError(f"module 'exegpt' has no attribute '{name}'")
    return getattr(import_module(_OFFERED[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_OFFERED})
