"""What a queue's decision costs under each order: `python -m benchmarks.orders`.

Ten thousand sequences wait; each decision books a step, takes in an arrival, looks at the first sequence at a new
moment, and admits it. Median and 99th percentile in microseconds, for each order alone and under the starvation guard.
"""

import argparse
import random
import sys
import time

from exegpt.batching import Hints, Queue, Sequence, Step
from exegpt.batching.order import FollowingOrder
from exegpt.orders import ORDERS, make_order

RESIDENTS = 256


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


def decisions(name: str, guarded: bool, waiting: int, count: int) -> list[float]:
    """Seconds of each of so many decisions."""
    rng, order = random.Random(0), make_order(name, guarded)
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
            taken = decisions(name, guarded, options.waiting, options.decisions)
            cells.append(f"{taken[len(taken) // 2] * 1e6:8.1f} {taken[int(len(taken) * 0.99)] * 1e6:8.1f}")
        print(f"{name:16} {cells[0]}   guarded {cells[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
