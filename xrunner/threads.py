"""CPU threads of this process."""

import os

from xcore.usable_cpus import cpu_ids, usable_cpus


def set_threads(threads: int | None) -> None:
    """Set the number of CPU threads.

    None keeps torch's choice (OMP_NUM_THREADS, or one per CPU of the process), reduced to the container's quota.
    """
    if threads is None and not os.environ.get("OMP_NUM_THREADS") and usable_cpus() < len(cpu_ids()):
        threads = usable_cpus()
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
