"""Which sequences run now: pure bookkeeping, no tensors, no clock. The event simulator and the engine run on it."""

from exegpt.batching.dispatch import deal
from exegpt.batching.forecast import Forecast
from exegpt.batching.hints import UNKNOWN, Hints
from exegpt.batching.kv_pool import BlockPool, KVPool
from exegpt.batching.ledger import Fits, Ledger
from exegpt.batching.micro_batches import MicroBatch, MicroBatching
from exegpt.batching.order import FollowingOrder, Order
from exegpt.batching.prefix_pool import PrefixPool
from exegpt.batching.queue import Queue
from exegpt.batching.sequence import Sequence, Status
from exegpt.batching.step import ENDLESS, Step

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
    "PrefixPool",
    "Queue",
    "Sequence",
    "Status",
    "Step",
    "deal",
]
