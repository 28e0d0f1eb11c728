"""Find the schedule that a server follows: the one with the highest goodput, whatever the rate will be."""

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from xcore.batching.admission import Admission
from xcore.console import output
from xcore.errors import Infeasible
from xcore.policies import TRAITS
from xscheduler.rate_sample import Arrivals, arrivals_of
from xscheduler.setting_search import infeasible_text
from xscheduler.settings import Setting

if TYPE_CHECKING:
    from xscheduler.open_tune import Rated, Sustained

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
    caches: bool = False,
) -> "Sustained":
    """Return the schedule that keeps the bound, less a margin, at the highest rate.

    The bound applies to the 99th percentile of latency, counted from arrival. With `grows`, the search uses admission
    *grow* if all policies can be searched with it. Otherwise it uses *reserve*, and the best schedule then grows. With
    `caches`, prompts share prefixes as in the workload, under the policies that can cache them. Raises Infeasible if
    there is no such schedule.
    """
    arrivals = arrivals_of(setting, "poisson", 0)
    shares = caches and arrivals.prefixes is not None and not setting.model.encoder_layers
    caching = tuple(policy for policy in policies if shares and TRAITS[policy].caches_prefixes)
    others = tuple(policy for policy in policies if policy not in caching)
    searches = [
        _searched(setting, arrivals, bound_s, some, fixed, grows, some is caching) for some in (caching, others) if some
    ]
    sustained = [best for rated in searches for best in rated.sustained.values()]
    if not sustained:
        tuned = min((rated.tuned for rated in searches), key=lambda tuned: tuned.lowest_latency_s or inf)
        lowest_s = tuned.lowest_latency_s
        servable = replace(tuned, lowest_latency_s=None if lowest_s is None else lowest_s / (1 - MARGIN))
        raise Infeasible(infeasible_text(servable, bound_s), servable.lowest_latency_s)
    return max(sustained, key=lambda best: best.goodput_seq_s)


def _searched(
    setting: Setting,
    arrivals: Arrivals,
    bound_s: float,
    policies: tuple[str, ...],
    fixed: dict[str, int] | None,
    grows: bool,
    caches: bool,
) -> "Rated":
    """Search these policies; with `caches`, prompts share prefixes as in the arrivals."""
    from xscheduler.goodput import RateBounds
    from xscheduler.open_tune import tune_at
    from xsimulator.estimates import GROWING

    admission: tuple[Admission, ...] = ("grow",) if grows and GROWING.issuperset(policies) else ("reserve",)
    where = (setting.model, setting.cluster, setting.workload, setting.profile, arrivals)
    with output.progress("searching for the highest goodput") as progress:
        return tune_at(
            *where,
            RateBounds(bound_s * (1 - MARGIN)),
            None,
            policies=policies,
            kv_dtype=setting.kv_dtype,
            fixed=fixed,
            admission=admission,
            prefix_caching=caches,
            progress=progress,
        )


def nearest_goodput(
    setting: Setting, bound_s: float, policies: tuple[str, ...], grows: bool = False, caches: bool = False
) -> tuple["Sustained", float]:
    """Return the schedule with the highest goodput within the lowest bound that any schedule keeps, and that bound (s).

    The lowest reachable latency can't be reached under a rate, so several bounds are tried. Raises Infeasible if no
    schedule fits at all.
    """
    while True:
        try:
            return highest_goodput(setting, bound_s, policies, grows=grows, caches=caches), bound_s
        except Infeasible as error:
            if error.lowest_latency_s is None:
                raise
            bound_s = max(LOOSER * bound_s, error.lowest_latency_s)
