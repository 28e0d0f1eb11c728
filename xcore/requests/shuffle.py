"""Shuffle a list of requests within windows, so that successive batches have lengths like those of the whole list."""

import random
from collections.abc import Sequence

from xcore.errors import InputError


def shuffled_places(arrivals_s: Sequence[float], window: int, seed: int) -> list[int]:
    """Return the places of the requests in their new order: at random within each `window` successive ones.

    Where lengths drift along a list, or inputs and outputs correlate, the batches' loads then differ less (ExeGPT,
    section 4.2).

    Raises:
        InputError: The requests arrive over time, so that their order is given.
    """
    if any(arrival != arrivals_s[0] for arrival in arrivals_s):
        raise InputError(
            "--shuffle reorders requests that all arrive at the start, but these arrive over time: leave it out."
        )
    random_order, places = random.Random(seed), list(range(len(arrivals_s)))
    windows = (places[start : start + window] for start in range(0, len(places), window))
    return [place for part in windows for place in random_order.sample(part, len(part))]
