"""WAA's decoding side with a full memory: as many residents as it holds, whatever batches come."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xsimulator.steady.scenario import Scenario
from xsimulator.steady.waa_decoding import iteration, mean_iterations
from xsimulator.steady.waa_encoding import BATCHES, Encoding, between, encoding

Array = NDArray[np.float64]

_ROUNDS = 60
"""After which at the latest a crowded decoding side's rate and residents agree."""


def room_for(scenario: Scenario, resident: float, micro_batches: int) -> int:
    """KV blocks that fit on every decoding stage beside the workspace of `resident` sequences, as far as those fit."""
    each = scenario.reservation(1).mean / max(mean_iterations(scenario), 1.0)
    most = scenario.once(("room", scenario.decode), lambda: scenario.room(1.0, "decode")) / each
    tokens = min(resident, max(most, 1.0)) / micro_batches
    return scenario.room(tokens, "decode")


@dataclass(frozen=True)
class Crowd:
    """A decoding side whose memory is full, as far as encoding keeps up with it."""

    rate: float
    """Sequences per second that finish."""
    resident: float
    batch: float
    """Prompts encoded together, as one of them finds it on average."""
    encoder: Encoding
    """With that batch."""
    more: float
    """Seconds that one more prompt takes."""
    seconds: Array
    """[1]: an iteration."""
    cells: Array
    """[1, stages]: each stage's work for a micro-batch in it."""


def crowd(scenario: Scenario, most: int, micro_batches: int, room: int) -> Crowd:
    """Whoever finishes makes room for the next, so that memory stays full on average, prompts are encoded a few at a
    time, as many (up to `most`) as find room until an iteration ends and the first stage is free again, and the number
    of residents hardly changes.

    n residents hold E[blocks | resident] each, the X · (encoding + KV transfer + half an iteration) sequences on their
    way E[blocks], and the next one that doesn't fit yet leaves half of its own free; X = n / (E[D] · T_D(n)). The more
    residents, the more are on their way: n is where both fill the room, found by false position (Illinois).
    """
    each, held = scenario.reservation(None).mean, scenario.reservation(1).mean / mean_iterations(scenario)

    def left(crowd: Crowd) -> float:
        """Residents for which there is still room."""
        encoder = crowd.encoder
        on_the_way = crowd.rate * (encoder.alone + encoder.kv_transfer + float(crowd.seconds[0]) / 2)
        return (room - each * (0.5 + on_the_way)) / held - crowd.resident

    few, many = (resident_crowd(scenario, n, most, micro_batches) for n in (1.0, max(room / held, 1.0)))
    above, below = left(few), left(many)
    if above <= 0:
        return few
    last = 0.0
    for _ in range(_ROUNDS):
        resident = (few.resident * -below + many.resident * above) / (above - below)
        full = resident_crowd(scenario, resident, most, micro_batches)
        rest = left(full)
        if abs(rest) <= 1e-9 * resident:
            break
        if rest > 0:
            few, above, below = full, rest, below / 2 if last > 0 else below
        else:
            many, below, above = full, rest, above / 2 if last < 0 else above
        last = rest
    return full


def resident_crowd(scenario: Scenario, resident: float, most: int, micro_batches: int) -> Crowd:
    """What so many residents make of the two sides, memory aside."""
    mean = mean_iterations(scenario)
    context = np.array([scenario.resident_context])
    joining = max(resident / mean, 1.0)  # who joined last is taken over meanwhile
    seconds, cells = iteration(scenario, np.array([resident]), context, micro_batches, joining)
    iteration_s = float(seconds[0])
    rate = resident / (mean * iteration_s)
    batch = admitted_together(scenario, rate, iteration_s, most)
    encoder, more = between(scenario, batch)
    return Crowd(rate, resident, batch, encoder, more, seconds, cells)


def admitted_together(scenario: Scenario, rate: float, iteration_s: float, most: int) -> float:
    """Prompts in a batch, as a prompt finds it, where they come one by one: itself and those (Poisson) that come until
    the side's first stage is free and an iteration ends; at most `most`.
    """

    def more_come(batch: int) -> float:
        return 1.0 + rate * max(encoding(scenario, batch).period, iteration_s) - batch

    low, above = 1.0, more_come(1)
    for high in BATCHES[1:]:
        if low >= most:
            break
        below = more_come(high)
        if below <= 0:
            return min(low + (high - low) * above / (above - below), float(most))
        low, above = float(high), below
    return float(most)
