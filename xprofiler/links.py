"""Links between the ranks of a measured job, as in a run.

MPI sends through host memory. If every rank has its own GPU, NCCL sends from GPU to GPU.
Numbers of repetitions are fixed, since all participating ranks must make the same calls.
"""

import functools
import itertools
from collections.abc import Callable

import torch

from xcore.errors import InputError
from xprofiler.timing import Timing, of_times, timed
from xrunner.comm.group_sum import LIMIT_BYTES, GroupSum
from xrunner.comm.ranks import Agreed, Ranks
from xrunner.comm.transport import summed
from xrunner.models.device import identity

REPEATS = 10
Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums a tensor over a tensor-parallel group."""


class HostLinks:
    """Links through host memory, by MPI."""

    how = "MPI through host memory"
    device = torch.device("cpu")

    def __init__(self, ranks: Ranks):
        self._ranks = ranks

    def all_reduce(self, tp: int) -> Reduce | None:
        """Return the sum over this rank's group of `tp` neighbours on its node; all ranks must call it.

        Return None for a rank without a full group.
        """
        group = self._ranks.group(tp)
        return functools.partial(summed, group=group) if group is not None else None

    def there_and_back(self, pair: tuple[int, int]) -> Callable[[torch.Tensor], object]:
        """Return a function that sends a tensor from the pair's first rank to its second, and back."""
        first = self._ranks.rank == pair[0]
        go = self._ranks.between(pair[1] if first else pair[0], first)
        return lambda x: go(x.numpy())

    def time(self, call: Callable[[], object]) -> Timing:
        """Time a call that other ranks make too."""
        return timed(call, least=REPEATS, most=REPEATS)


class DirectLinks:
    """Links from device to device, by torch.distributed. All ranks construct it at once."""

    def __init__(self, ranks: Ranks, pairs: tuple[tuple[int, int], ...], device: torch.device, backend: str = "nccl"):
        import torch.distributed as dist

        from xrunner.comm.direct import join

        join(ranks, backend)
        self._ranks, self._backend, self.device = ranks, backend, device
        self._pairs = {pair: dist.new_group(list(pair), backend=backend) for pair in pairs}
        self._symmetric: list[int] = []
        """Degrees at which small sums go by symmetric memory."""

    @property
    def how(self) -> str:
        """The transport, with the degrees whose `all_reduce` goes by symmetric memory."""
        small = f", all-reduces up to {LIMIT_BYTES // 2**20} MiB by symmetric memory at degrees"
        degrees = ", ".join(map(str, self._symmetric))
        return "NCCL between GPUs" + (f"{small} {degrees}" if degrees else "")

    def all_reduce(self, tp: int) -> Reduce | None:
        """Return the sum over this rank's group of `tp` neighbours on its node; all ranks must call it.

        Return None for a rank without a full group.
        """
        import torch.distributed as dist

        mine = None
        for node in self._ranks.nodes:
            for first in range(0, len(node) - tp + 1, tp):
                members = node[first : first + tp]
                group = dist.new_group(list(members), backend=self._backend)
                mine = group if self._ranks.rank in members else mine

        reduce = GroupSum(self._ranks, mine, self.device)
        if reduce.symmetric:
            self._symmetric.append(tp)
        return reduce if mine is not None else None

    def there_and_back(self, pair: tuple[int, int]) -> Callable[[torch.Tensor], object]:
        """Return a function that sends a tensor from the pair's first rank to its second, and back."""
        import torch.distributed as dist

        first, group = self._ranks.rank == pair[0], self._pairs[pair]
        other = pair[1] if first else pair[0]

        def go(x: torch.Tensor) -> None:
            for sends in (first, not first):
                (dist.send if sends else dist.recv)(x, other, group=group)

        return go

    def time(self, call: Callable[[], object]) -> Timing:
        """Return device seconds of a call that other ranks make too.

        All calls are queued at once, so that after the first call no rank waits for another rank's host.
        """
        call()
        moments = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 2)]
        for moment in moments:
            moment.record()
            call()
        moments[-1].synchronize()
        return of_times([a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(moments[1:])])


Links = HostLinks | DirectLinks


def make_links(ranks: Ranks, pairs: tuple[tuple[int, int], ...], device: torch.device) -> Links:
    """Return the links between the ranks.

    Raises:
        Agreed: Several ranks share a GPU, or torch has no NCCL.
    """
    if ranks.size == 1 or device.type == "cpu":
        return HostLinks(ranks)
    ranks.agree(_has_nccl)
    if len(set(ranks.all((ranks.host, identity(device))))) < ranks.size:
        raise Agreed(
            f"{ranks.size} ranks share fewer GPUs, so their times can't be separated: start one rank for each GPU."
        )
    return DirectLinks(ranks, pairs, device)


def _has_nccl() -> dict[str, str]:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_nccl_available()):
        raise InputError(
            f"torch {torch.__version__} has no NCCL, which measurements on several GPUs need: profile one GPU with "
            "one rank, or import published measurements with `exegpt profile import`."
        )
    return {}
