"""Slack: how long others may pass an accepted request in the queue without breaking its promise.

See `xcore/orders/promised.py`.
"""

import math

from xserver.admission.admission_control import Promise

SHARE = 0.5
"""Share of the time between the predicted and the promised end.

The rest is for an order's effect on the queue: those that it lets wait have longer answers than admission expects.
"""


def slack_s(promise: Promise, bound_s: float) -> float:
    """Return for how many seconds others may pass a request; for the bound, if the request is outside the bound."""
    return bound_s if math.isinf(promise.due_s) else SHARE * max(0.0, promise.due_s - promise.finish_s)
