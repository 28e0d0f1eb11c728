"""The number of threads of torch's operators and of the kernels that numba compiles: the same for both."""

import threading

import numba
import torch

# OpenMP's threads stay awake between two calls: a call costs a microsecond, where numba's own pool takes seventy.
_CONFIG = vars(numba.config)  # its attributes are made at run time
_CONFIG["THREADING_LAYER_PRIORITY"] = ["omp", "tbb", "workqueue"]

_asked = torch.get_num_threads()
numba.get_num_threads()  # numba's first call makes OpenMP, and so torch, use every CPU
torch.set_num_threads(_asked)


class _Followed(threading.local):
    """The number of threads that this thread has set: numba has one for each, and takes a microsecond to return it."""

    threads = 0


_followed = _Followed()


def follow_torch() -> None:
    """Set numba's number of threads to torch's (at most the CPUs that numba found)."""
    threads = torch.get_num_threads()
    if _followed.threads != threads:
        numba.set_num_threads(min(threads, _CONFIG["NUMBA_NUM_THREADS"]))
        _followed.threads = threads


def compiled(x: torch.Tensor) -> bool:
    """Return whether numba's kernels take this tensor: float32 or bfloat16, on the CPU.

    If they do, also set numba's threads to torch's.
    """
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
        return False
    follow_torch()
    return True
