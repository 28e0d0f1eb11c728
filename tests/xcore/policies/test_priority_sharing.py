"""The time for which a model's first prompt stays first, by the declared changes of its order."""

from math import inf
from types import SimpleNamespace

import pytest

from xcore.policies.priority_sharing import _waiting_s


class Queue:
    """Several waiting requests, in an order that may change with time, at times that may be known."""

    def __init__(self, count, changes, next_s=None):
        self.count = count
        self.order = SimpleNamespace(changes=changes)
        if next_s is not None:
            self.order.next_change_s = lambda running, now: next_s

    def __len__(self):
        return self.count


@pytest.mark.parametrize(
    ("queues", "seconds"),
    [
        ([Queue(9, False)], inf),
        ([Queue(0, True), Queue(1, True)], inf),
        ([Queue(1, True), Queue(2, True)], 0.0),
        ([Queue(9, True, 7.0), Queue(9, True, 6.0), Queue(1, True)], 2.0),
        ([Queue(9, True, 7.0), Queue(2, True)], 0.0),
    ],
)
def test_a_first_prompt_stays_where_no_other_can_pass_it(queues, seconds):
    """At 4 s: an order that changes at unknown times may pass the first of two, and one alone stays first."""
    tenants = [SimpleNamespace(ledger=SimpleNamespace(waiting=queue)) for queue in queues]
    assert _waiting_s(SimpleNamespace(tenants=tenants), 4.0) == seconds
