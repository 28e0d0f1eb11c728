"""Real arrivals for Hermes' applications: those of Azure's public traces, beside the exponential bursts."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from xcore.arrays import Array
from xcore.traces.trace import read_trace

TRACES = {
    "Azure, conversations": "AzureLLMInferenceTrace_conv.csv",
    "Azure, code": "AzureLLMInferenceTrace_code.csv",
}


def find_traces(graphs: Path | None = None) -> dict[str, Array]:
    """Return the arrivals of Azure's traces in seconds, by name, as far as the public data are there.

    They are in the folder `azure` of EXEGPT_DATA, or beside the folder of a file of `graphs`.
    """
    folder = os.environ.get("EXEGPT_DATA") or (graphs.resolve().parent.parent if graphs else None)
    paths = {name: Path(folder) / "azure" / file for name, file in TRACES.items()} if folder else {}
    return {
        name: np.sort([row.arrival_s for row in read_trace(path)]) for name, path in paths.items() if path.is_file()
    }


def consecutive(arrivals: Sequence[float] | Array, count: int, window_s: float, seed: int) -> list[float]:
    """Return `count` consecutive arrivals of a trace, from a random one on, stretched to begin at 0 and fill a window.

    Raises:
        ValueError: The trace is shorter.
    """
    if count > len(arrivals):
        raise ValueError(f"{count} arrivals of a trace of {len(arrivals)}")
    first = int(np.random.default_rng((seed, 3)).integers(len(arrivals) - count + 1))
    chosen = np.asarray(arrivals[first : first + count], np.float64)
    stretched: list[float] = ((chosen - chosen[0]) * window_s / max(chosen[-1] - chosen[0], 1e-9)).tolist()
    return stretched
