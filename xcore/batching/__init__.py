"""Which sequences run now: bookkeeping without tensors and without a clock, for the event simulator and the engine."""

from xcore.batching.dispatch import deal
from xcore.batching.forecast import Forecast
from xcore.batching.giving_way import Preemption, Swap
from xcore.batching.hints import UNKNOWN, Hints
from xcore.batching.kv_pool import BlockPool, KVPool
from xcore.batching.ledger import Fits, Ledger
from xcore.batching.micro_batches import MicroBatch, MicroBatching
from xcore.batching.order import FollowingOrder, Order
from xcore.batching.prefix_pool import PrefixPool
from xcore.batching.queue import Queue
from xcore.batching.sequence import Sequence, Status
from xcore.batching.step import ENDLESS, Step

__all__ = [
    "ENDLESS",
    "UNKNOWN",
    "BlockPool",
    "Fits",
    "FollowingOrder",
    "Forecast",
    "Hints",
    "KVPool",
    "Ledger",
    "MicroBatch",
    "MicroBatching",
    "Order",
    "Preemption",
    "PrefixPool",
    "Queue",
    "Sequence",
    "Status",
    "Step",
    "Swap",
    "deal",
]
