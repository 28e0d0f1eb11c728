"""KV capacity: the KV blocks that requests need under a schedule."""

from collections.abc import Iterable
from dataclasses import replace

from xcore.batching.admission import most_cached
from xcore.requests.request import Request
from xcore.specs.schedule import Schedule


def blocks_needed(request: Request, schedule: Schedule) -> int:
    """Return the KV blocks for all tokens that a request may ever cache."""
    start = bool(schedule.model.spec.encoder_layers)
    tokens: int = most_cached(len(request.prompt_ids), request.max_tokens, start)
    return -(-tokens // schedule.block_size)


def grow_to_fit(schedule: Schedule, requests: Iterable[Request]) -> Schedule:
    """Grow a schedule's cache so that each of these requests fits.

    The requests were accepted under another schedule, and this one may be for shorter requests.
    """
    needed = (blocks_needed(request, schedule) for request in requests)
    return replace(schedule, kv_blocks=max(schedule.kv_blocks, *needed, 0))
