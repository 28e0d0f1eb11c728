"""Times of moving data between the ranks of a job: all-reduces of hidden states, point-to-point sends, copies."""

import functools

import torch

from xcore.specs.device_spec import LinkSpec
from xcore.specs.profile import Table
from xprofiler.links import Links, Reduce
from xprofiler.recorder import Grid, Recorder
from xprofiler.timing import Timing, timed
from xrunner.comm.ranks import Ranks

_BYTES = tuple(4**i for i in range(5, 14))
_COPY_BYTES = 2**26

HOST_COPY = Grid("host_copy", ("bytes",), ((_COPY_BYTES,),))
ALONE = Table(("bytes",), ((1.0,),), (0.0,))
"""The send table of a single device."""


def time_all_reduce(links: Links, reduce: Reduce | None, rows: int, hidden: int, dtype: torch.dtype) -> Timing | None:
    """Time an all-reduce of [rows, hidden] over a group of ranks; all groups of the job do it at once, as in a run.

    Return None for a rank without a group.
    """
    if reduce is None:
        return None
    x = torch.zeros(rows, hidden, dtype=dtype, device=links.device)
    return links.time(lambda: reduce(x))


def pairs(ranks: Ranks) -> dict[str, tuple[int, int]]:
    """Return the two ranks that measure each kind of link of the job: those of neighbouring pipeline stages."""
    by_link = {}
    if ranks.per_node > 1:
        by_link["send"] = (ranks.nodes[0][0], ranks.nodes[0][1])
    if len(ranks.nodes) > 1:
        by_link["send_between_nodes"] = (ranks.nodes[0][-1], ranks.nodes[1][0])
    return by_link


def link_grids(ranks: Ranks) -> tuple[Grid, ...]:
    """Return the grids of the job's links; each point is measured once per pass."""
    sends = tuple(Grid(name, ("bytes",), (_BYTES,)) for name in pairs(ranks))
    return (*sends, HOST_COPY) if ranks.size > 1 else ()


def measure_links(recorder: Recorder, ranks: Ranks, links: Links, turn: int) -> None:
    """Run one pass over the points of `link_grids`: the pair's ranks send, and the other ranks sleep meanwhile."""
    for name, pair in pairs(ranks).items():
        for size in _BYTES:
            recorder.record(name, (size,), turn, functools.partial(_time_send, ranks, links, pair, size))
    if ranks.size > 1:
        recorder.record(HOST_COPY.table, (_COPY_BYTES,), turn, lambda: _time_copy(_COPY_BYTES))


def _time_send(ranks: Ranks, links: Links, pair: tuple[int, int], size: int) -> Timing | None:
    """Time a message of `size` bytes in one direction: half of the time there and back."""
    if ranks.rank not in pair:
        return None
    x, go = torch.zeros(size, dtype=torch.uint8, device=links.device), links.there_and_back(pair)
    timing = links.time(lambda: go(x))
    return Timing(timing.seconds / 2, timing.spread)


def _time_copy(size: int) -> Timing:
    """Time a copy within host memory, on all ranks at once."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    return timed(lambda: target.copy_(source))


def sends(recorder: Recorder, ranks: Ranks) -> tuple[Table, Table]:
    """Return the tables of sends within a node and between nodes; with one kind of link both are equal."""
    grids = {grid.table: grid for grid in link_grids(ranks)}
    tables = {name: recorder.compiled(grids[name]) for name in pairs(ranks)}
    within = tables.get("send") or tables.get("send_between_nodes") or ALONE
    return within, tables.get("send_between_nodes") or within


def host_copy(recorder: Recorder, ranks: Ranks) -> dict[str, str]:
    """Return the rate of copies within host memory, if it was measured, as a fact of a Profile's provenance."""
    if ranks.size == 1:
        return {}
    return {"host_copy_bytes_s": f"{_COPY_BYTES / recorder.compiled(HOST_COPY).values[0]:.4g}"}


def link(table: Table, share: float = 1.0) -> LinkSpec:
    """Return the link that a table over bytes describes, with `share` bytes of traffic per byte of a message.

    The latency is the smallest message's time. The bandwidth is the largest message's bytes over its time beyond the
    latency.
    """
    (sizes,), (latency, *_, longest) = table.points, table.values
    carrying = longest - latency if longest > latency else longest
    return LinkSpec(share * sizes[-1] / carrying, latency)
