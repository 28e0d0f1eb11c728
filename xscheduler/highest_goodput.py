"""Find the schedule that a server follows: the one with the highest goodput, whatever the rate will be."""

from dataclasses import replace
from typing import TYPE_CHECKING

from xcore.batching.admission import Admission
from xcore.console import output
from xcore.errors import Infeasible
from xscheduler.rate_sample import arrivals_of
from xscheduler.setting_search import infeasible_text
from xscheduler.settings import Setting

if TYPE_CHECKING:
    from xscheduler.open_tune import Sustained

MARGIN = 0.15
"""Share of the bound that the search keeps as a margin, because a machine is never as regular as its profile."""


LOOSER = 1.1
"""Factor from a bound that no schedule keeps to the next bound to try."""


def highest_goodput(
    setting: Setting,
    bound_s: float,
    policies: tuple[str, ...],
    fixed: dict[str, int] | None = None,
    grows: bool = False,
) -> "Sustained":
    """Return the schedule that keeps the bound, less a margin, at the highest rate.

    The bound applies to the 99th percentile of latency, counted from arrival. With `grows`, the search uses admission
    *grow* if all policies can be searched with it. Otherwise it uses *reserve*, and the best schedule then grows.
    Raises Infeasible if there is no such schedule.
    """
    from xscheduler.goodput import RateBounds
    from xscheduler.open_tune import tune_at
    from xsimulator.estimates import GROWING

    admission: tuple[Admission, ...] = ("grow",) if grows and GROWING.issuperset(policies) else ("reserve",)
    arrivals = arrivals_of(setting, "poisson", 0)
    where = (setting.model, setting.cluster, setting.workload, setting.profile, arrivals)
    with output.progress("searching for the highest goodput") as progress:
        rated = tune_at(
            *where,
            RateBounds(bound_s * (1 - MARGIN)),
            None,
            policies=policies,
            kv_dtype=setting.kv_dtype,
            fixed=fixed,
            admission=admission,
            progress=progress,
        )
    if not rated.sustained:
        lowest_s = rated.tuned.lowest_latency_s
        servable = replace(rated.tuned, lowest_latency_s=None if lowest_s is None else lowest_s / (1 - MARGIN))
        raise Infeasible(infeasible_text(servable, bound_s), servable.lowest_latency_s)
    return max(rated.sustained.values(), key=lambda sustained: sustained.goodput_seq_s)


def nearest_goodput(
    setting: Setting, bound_s: float, policies: tuple[str, ...], grows: bool = False
) -> tuple["Sustained", float]:
    """Return the schedule with the highest goodput within the lowest bound that any schedule keeps, and that bound (s).

    The lowest reachable latency can't be reached under a rate, so several bounds are tried. Raises Infeasible if no
    schedule fits at all.
    """
    while True:
        try:
            return highest_goodput(setting, bound_s, policies, grows=grows), bound_s
        except Infeasible as error:
            if error.lowest_latency_s is None:
                raise
            bound_s = max(LOOSER * bound_s, error.lowest_latency_s)
