"""Orders: which waiting request is admitted first. Each order is a function from a sequence to its sorting key.

An order decides which of the waiting and preempted sequences the ledger admits next. Under a `Preemption`, some orders
also decide which running sequences give way to them; otherwise only a lack of KV blocks preempts (`Ledger.grow`).
"""

from xcore.batching import Order
from xcore.errors import InputError
from xcore.orders.applications import FirstApplication
from xcore.orders.by_demand import DemandGittins, DemandSlack
from xcore.orders.deadline import EDF
from xcore.orders.doubling_budget import DoublingBudget
from xcore.orders.fcfs import FCFS, fcfs
from xcore.orders.kind import OrderKind
from xcore.orders.learned import Learned
from xcore.orders.least_slack import LeastSlack
from xcore.orders.mlfq import SkipJoinMLFQ
from xcore.orders.product import Product
from xcore.orders.ranked_demands import RankedDemands
from xcore.orders.round_robin import RoundRobin
from xcore.orders.shortest import SJF, SRTF
from xcore.orders.starvation_guard import StarvationGuard
from xcore.orders.vtc import VTC

__all__ = ["ORDERS", "OrderKind", "StarvationGuard", "fcfs", "make_order", "order_kind"]

_LENGTH, _TIME = "output_tokens", "time_s"

ORDERS = {
    kind.name: kind
    for kind in (
        OrderKind("fcfs", "first come, first served", FCFS, ranks_running=True),
        OrderKind("fcfs-app", "applications first come, first served (Parrot)", FirstApplication, ("application",)),
        OrderKind("round-robin", "services, or clients, in turn", RoundRobin),
        OrderKind("mlfq", "skip-join multi-level feedback queues (FastServe)", SkipJoinMLFQ, ("prefill_s",)),
        OrderKind("sjf", "the shortest output", SJF, (_LENGTH,), oracle=True, ranks_running=True),
        OrderKind("srtf", "the shortest rest of an output", SRTF, (_LENGTH,), oracle=True, ranks_running=True),
        OrderKind("learned", "the shortest output by a ranker (vLLM-LTR)", Learned, ("score",), ranks_running=True),
        OrderKind(
            "product",
            "T'·L̂ (SeaLLM)",
            Product,
            (_LENGTH, _TIME, "service_time_s"),
            oracle=True,
            ranks_running=True,
        ),
        OrderKind("doubling-budget", "remaining budget times L̂ (SeaLLM)", DoublingBudget, ("service_time_s",)),
        OrderKind(
            "least-slack", "deadline less remaining time", LeastSlack, (_LENGTH, _TIME, "deadline_s"), oracle=True
        ),
        OrderKind("edf", "the earliest deadline", EDF, ("deadline_s",), ranks_running=True),
        OrderKind(
            "gittins",
            "the application with the lowest cost per completion (Hermes)",
            DemandGittins,
            ("application", "unit"),
            ranked=DemandGittins,
        ),
        OrderKind(
            "demand-slack",
            "the application whose deadline is nearest, less its longest remaining demand (Hermes)",
            DemandSlack,
            ("application", "unit"),
            ranked=DemandSlack,
        ),
        OrderKind("vtc", "the client served least (VTC)", VTC, ("client",)),
    )
}
"""Every order's kind by its name."""


def order_kind(name: str) -> OrderKind:
    """Return an order's kind; InputError for an unknown name."""
    if name not in ORDERS:
        raise InputError(f"There is no order '{name}': use one of {', '.join(ORDERS)}.")
    return ORDERS[name]


def make_order(name: str, guarded: bool = False, demands: RankedDemands | None = None) -> Order:
    """Build an order by its name, with the starvation guard if `guarded`. InputError for an unknown name.

    `demands` are those of the applications, for orders that rank them.
    """
    kind = order_kind(name)
    order = kind.ranked(demands) if kind.ranked and demands else kind.make()
    return StarvationGuard(order) if guarded else order
