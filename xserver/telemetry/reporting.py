"""A barrier around reporting code: its failures are counted and logged, and change no answer."""

import contextlib
import traceback
from collections.abc import Iterator
from typing import Literal, get_args

from prometheus_client import Counter

from xcore.console import output

Kind = Literal["history", "lengths", "log", "metrics", "monitor", "prediction", "tracing"]
"""The kinds of reports that can fail; `lengths` are those that admission learns from."""

FAILURES = Counter("exegpt_reporting_failures", "Failed reports; no client was affected.", ["kind"], registry=None)
"""The counter of this process; a server registers it with its other metrics."""
for _kind in get_args(Kind):
    FAILURES.labels(_kind)

_logged: set[tuple[Kind, str]] = set()
"""Logged failures: the kind and the place."""


@contextlib.contextmanager
def reporting(kind: Kind) -> Iterator[None]:
    """Return a context, or a decorator, that contains failures: no answer and no engine ends because of them.

    A failure is logged once for each place, without its message, which may repeat a client's data.
    """
    try:
        yield
    except Exception as error:
        FAILURES.labels(kind).inc()
        where = place(error)
        if (kind, where) not in _logged:
            _logged.add((kind, where))
            text = f"a report ({kind}) has failed; further failures at this place are only counted: {where}"
            output.note(text, event="report_failed", kind=kind)


def place(error: BaseException) -> str:
    """Return an exception's class, and the place where it was raised, without its message."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    places = " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames)
    return f"{type(error).__name__} at {places}"
