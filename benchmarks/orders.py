"""What a queue's decision costs under each order: `python -m benchmarks.orders`.

Ten thousand sequences wait; each decision books a step, takes in an arrival, looks at the first sequence at a new
moment, and admits it. Median and 99th percentile in microseconds, for each order alone and under the starvation guard.
Last, what least slack takes with a key that has the time in it, which is computed anew for all that wait.
"""

import argparse
import random
import sys
import time

from xcore.batching import Hints, Order, Queue, Sequence, Step
from xcore.batching.order import FollowingOrder
from xcore.orders import ORDERS, make_order

RESIDENTS = 256


class SlackByTheClock:
    """Least slack, written down as it is defined."""

    changes = True

    def key(self, sequence: Sequence, now: float) -> float:
        """Deadline - now - remaining time."""
        hints = sequence.hints
        assert hints.deadline_s is not None and hints.time_s is not None
        return hints.deadline_s - now - hints.time_s


def sequence(index: int, arrival_s: float, rng: random.Random) -> Sequence:
    """One of a random length and client, with all hints."""
    tokens, output, client = rng.randrange(10, 2000), rng.randrange(1, 800), str(rng.randrange(100))
    hints = Hints(
        application=str(index // 5),
        application_arrival_s=arrival_s,
        client=client,
        service=client,
        deadline_s=arrival_s + rng.uniform(1.0, 100.0),
        output_tokens=output,
        score=-rng.random(),
        prefill_s=tokens * 1e-4,
        time_s=output * 0.01,
        service_time_s=rng.uniform(0.5, 8.0),
        service_sd_s=0.5,
    )
    return Sequence(index, tokens, output, arrival_s, hints=hints)


def decisions(order: Order, waiting: int, count: int) -> list[float]:
    """Seconds of each of so many decisions."""
    rng = random.Random(0)
    queue, following = Queue(order), order if isinstance(order, FollowingOrder) else None
    for index in range(waiting):
        queue.push(sequence(index, index * 0.001, rng))
    now = waiting * 0.001
    queue.peek(now)
    running = [sequence(-1 - i, 0.0, rng) for i in range(RESIDENTS)]
    arriving = [sequence(waiting + i, now + (i + 1) * 0.02, rng) for i in range(count)]
    seconds = []
    for arrival in arriving:
        now += 0.02
        step = Step((), tuple(running))
        begin = time.perf_counter()
        if following:
            following.book(step, 1)
        queue.push(arrival)
        first = queue.peek(now)
        assert first
        queue.pop()
        if following:
            following.start(first, now)
        seconds.append(time.perf_counter() - begin)
        running = [*running[1:], first]
    return sorted(seconds)


def main(argv: list[str] | None = None) -> int:
    """Print a line for each order."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--decisions", type=int, default=2_000)
    parser.add_argument("--order", choices=list(ORDERS), help="only this one")
    options = parser.parse_args(argv)
    print(f"{options.waiting:,} waiting, {options.decisions:,} decisions: median and p99 in µs")
    for name in [options.order] if options.order else ORDERS:
        cells = []
        for guarded in (False, True):
            cells.append(_cell(decisions(make_order(name, guarded), options.waiting, options.decisions)))
        print(f"{name:16} {cells[0]}   guarded {cells[1]}")
    print(f"{'by the clock':16} {_cell(decisions(SlackByTheClock(), options.waiting, min(options.decisions, 200)))}")
    return 0


def _cell(seconds: list[float]) -> str:
    return f"{seconds[len(seconds) // 2] * 1e6:8.1f} {seconds[int(len(seconds) * 0.99)] * 1e6:8.1f}"


if __name__ == "__main__":
    sys.exit(main())
