"""Compare decoding iterations measured on an H100 with the predictions of its profile and of data sheets.

python -m benchmarks.gpu.predicted
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from xcore import document
from xcore.specs.profile import Profile
from xscheduler.settings import find_setting
from xsimulator.cost.group import Group
from xsimulator.cost.stage import StageCost

MODEL, CONTEXT = "llama-3.1-8b", 1024
PROFILE = Path(__file__).parent / "profiles/llama-3.1-8b-h100-sxm.json"
"""Measured by `python -m benchmarks.gpu --parts profile` on 2026-11-26, in bfloat16 with Triton's attention."""
MEASURED_S = {1: 6.94e-3, 64: 9.92e-3, 256: 20.34e-3}
"""Seconds of an iteration as a CUDA graph, by its number of sequences of 1,024 tokens; same machine and day."""


@dataclass(frozen=True)
class Predicted:
    """One prediction of a decoding iteration."""

    source: str
    batch: int
    seconds: float

    @property
    def error(self) -> float:
        """(measured - predicted) / measured"""
        return 1 - self.seconds / MEASURED_S[self.batch]


def predictions() -> list[Predicted]:
    """Predict every measured iteration by the profile, and by data sheets with and without our engine's own time."""
    sources = {"profile": document.read(Profile, PROFILE)}
    for engine in ("none", "exegpt"):
        setting = find_setting(MODEL, "1xH100-SXM", f"{CONTEXT}/256", "roofline", dtype="bf16", engine=engine)
        sources[f"roofline, engine {engine}"] = setting.profile
    rows = []
    for source, profile in sources.items():
        stage = StageCost(Group(profile.degree(1), profile.overhead, watched=False), layers=32)
        rows += [Predicted(source, batch, float(stage.decode(batch, CONTEXT))) for batch in MEASURED_S]
    return rows


def main() -> int:
    """Print the table."""
    for row in predictions():
        measured = MEASURED_S[row.batch]
        print(
            f"{row.source:24} {row.batch:3} × 1 of {CONTEXT}: {row.seconds * 1e3:5.2f} ms, measured "
            f"{measured * 1e3:5.2f}, error {row.error:+.1%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
