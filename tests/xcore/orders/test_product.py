"""T'·L̂ against all permutations: best for two services with equal times per service, one at a time."""

import random
from itertools import permutations

from tests.xcore.orders.score_scale import ScoreScale
from xcore.batching import Hints, Queue, Sequence
from xcore.orders import make_order


def cost(order, times, means):
    """The sum of finish over the service's mean time, run one after the other."""
    now = total = 0.0
    for i in order:
        now += times[i]
        total += now / means[i]
    return total


def by_key(times, means):
    """The indices in the order of a queue."""
    queue = Queue(make_order("product"))
    for i, (time_s, mean) in enumerate(zip(times, means, strict=True)):
        queue.push(Sequence(i, 1, 1, hints=Hints(time_s=time_s, service_time_s=mean)))
    return [sequence.index for sequence in queue.first(len(times), 0.0)]


def test_the_product_is_best_for_two_services_of_equal_times():
    """And dividing by the mean time, which all requests of such services have alike, is not."""
    rng, divided_worse = random.Random(7), 0
    for _ in range(200):
        kinds = [rng.uniform(0.1, 9.0) for _ in range(2)]
        means = [kinds[rng.randrange(2)] for _ in range(6)]
        best = min(cost(order, means, means) for order in permutations(range(6)))
        assert cost(by_key(means, means), means, means) <= best * (1 + 1e-12)
        reverse = sorted(range(6), key=lambda i: -means[i])
        divided_worse += cost(reverse, means, means) > best * 1.01
    assert divided_worse > 150, "the instances tell orders apart"


def test_scores_of_two_models_are_compared_by_their_lengths():
    """A model of short outputs and one of long ones, whose scores are on other scales."""
    short = ScoreScale.of([0.1, 0.2, 0.3, 0.4], [10, 20, 30, 40])
    long = ScoreScale.of([100.0, 200.0, 300.0, 400.0], [25, 250, 300, 400])
    assert [short.length(score) for score in (9.0, 0.35, 0.15, -1.0)] == [10, 20, 40, 40]
    assert [long.length(score) for score in (500.0, 350.0, 250.0, 0.0)] == [25, 250, 300, 400]
    raw = {"short": (short, 0.35), "long": (long, 250.0)}
    queue = Queue(make_order("learned"))
    for i, (scale, score) in enumerate(raw.values()):
        queue.push(Sequence(i, 1, 1, hints=Hints(score=scale.score(score))))
    assert [s.index for s in queue.first(2, 0.0)] == [0, 1], "20 tokens before 300, though 250 > 0.35"
