"""The profile of this machine, or of a job's ranks, for commands that run requests: the stored one, else one that is
measured at a few points first.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from exegpt.profile import Profile
    from xprofiler.job import Job
    from xrunner.comm.ranks import Ranks


def own_profile(directory: Path, dtype: str, ranks: "Ranks", device: "torch.device", attention: str) -> "Job":
    """The ranks' cluster and its profile: stored, else measured now at few points, with a progress bar. All ranks call
    it alike, and all get it.
    """
    from exegpt.cli import output
    from xprofiler.job import measured_job

    first = ranks.rank == 0
    with output.progress("measuring a few points") if first else nullcontext(lambda done, total: None) as progress:
        return measured_job(directory, dtype, ranks, device, lambda _, done, total: progress(done, total), attention)


def profile_text(profile: "Profile") -> str:
    """Which measured profile this is, and what could be better about it."""
    from xprofiler.store import is_coarse

    if is_coarse(profile):
        return (
            f"profile: measured on this machine at a few points ({profile.fingerprint}); `exegpt profile` measures all"
        )
    return f"profile: measured on this machine ({profile.fingerprint})"


def speed_text(slowdown: tuple[float, float, float]) -> str:
    """What the machine's speed does to a prediction; empty within 3 %."""
    if max(abs(1 - factor) for factor in slowdown) <= 0.03:
        return ""
    compute, read, stream = (f"{factor:.2f} times as long" for factor in slowdown)
    return (
        f"the machine's speed has changed since it was profiled: computing takes {compute}, reading weights "
        f"{read}, the head and attention {stream}; the prediction is scaled by them (`exegpt profile` measures again)"
    )
