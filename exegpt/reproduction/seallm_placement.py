"""The time of SeaLLM's placement (Figure 14), by numbers of GPUs and of services, in seconds of this machine's CPU."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from exegpt.report.sections import Section
from exegpt.reproduction.seallm_systems import OURS, RULES, History, two_stage
from exegpt.reproduction.seallm_workload import NODE, SERVICES, SeaService, Traffic, services, traffic_of
from xcore.quantity import figure_text

SIZES = (*((nodes, SERVICES) for nodes in (2, 4, 6, 8)), (4, 8), (4, 12))
"""Numbers of nodes, and of services."""
QUICK_SIZES = SIZES[:1]
PAST = Traffic(20.0, 4.0, 60.0, 2)
"""The simulated requests: a minute at 20/s, for sixteen services."""


@dataclass(frozen=True)
class PlacementTime:
    """One search for a placement."""

    gpus: int
    services: int
    requests: int
    """Requests of each simulation."""
    cpu_s: float
    """Seconds of one CPU."""
    degree: int | None
    """The tensor-parallel degree of the best placement; None without one."""


def placement_times(sizes: Sequence[tuple[int, int]]) -> tuple[PlacementTime, ...]:
    """Search placements of the first services, with as many requests per service, on so many nodes."""
    rows = []
    for nodes, count in sizes:
        of = _first(count)
        traffic = replace(PAST, rate_seq_s=PAST.rate_seq_s * sum(s.popularity for s in services()[:count]))
        history = History(of, traffic_of(traffic, of), nodes, traffic.rate_seq_s)
        begin_s = time.process_time()
        placed = two_stage(history, RULES[OURS])
        cpu_s = time.process_time() - begin_s
        requests = sum(len(asked.inputs) for asked in history.asked.values())
        rows.append(PlacementTime(nodes * NODE, count, requests, cpu_s, placed.tp if placed else None))
    return tuple(rows)


def _first(count: int) -> tuple[SeaService, ...]:
    """Return the first services, with popularities whose sum is 1."""
    total = sum(service.popularity for service in services()[:count])
    return tuple(replace(service, popularity=service.popularity / total) for service in services()[:count])


def section(times: Sequence[PlacementTime]) -> Section:
    """Return the table."""
    from xprofiler.machine import cpu_name

    rows = tuple(
        (
            str(row.gpus),
            str(row.services),
            f"{row.requests:,}",
            figure_text(row.cpu_s),
            f"TP{row.degree}" if row.degree else "no placement",
        )
        for row in times
    )
    notes = (
        f"In one process on {cpu_name()}. Paper (Figure 14): below one minute in up to eight processes.",
        "All degrees are searched; each distinct group of services is simulated once.",
    )
    columns = ("GPUs", "services", "requests simulated", "CPU s", "degree")
    return Section("Time of SeaLLM's placement", columns, rows, notes)
