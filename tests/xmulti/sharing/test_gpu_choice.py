"""Which GPUs a stage gets: each once, groups on linked GPUs, and what moves is the cheapest that can."""

import itertools
import random

from xmulti.sharing.gpu_choice import choose_gpus
from xmulti.stages.greedy_stages import Host
from xmulti.stages.stage_progress import Parallel


def test_what_runs_stays():
    stage = {"a": Parallel(1, 1), "b": Parallel(1, 2)}
    chosen = choose_gpus(stage, {"a": (3,)}, {"a": 5.0}, Host(4, 2))
    assert chosen == {"a": (3,), "b": (0, 1)}


def test_the_cheaper_one_moves_for_a_linked_pair():
    stage = {"a": Parallel(1, 1), "b": Parallel(1, 1), "c": Parallel(1, 2)}
    running = {"a": (0,), "b": (2,)}
    assert choose_gpus(stage, running, {"a": 5.0, "b": 3.0}, Host(4, 2)) == {"a": (0,), "b": (1,), "c": (2, 3)}
    assert choose_gpus(stage, running, {"a": 2.0, "b": 3.0}, Host(4, 2)) == {"a": (3,), "b": (2,), "c": (0, 1)}


def test_single_gpus_leave_pairs_whole():
    chosen = choose_gpus({"a": Parallel(3, 1)}, {"b": (4,)}, {"b": 1.0}, Host(8, 2))
    assert chosen == {"a": (0, 1, 2)}


def fits(stage, fixed, host):
    """Whether the others fit beside what is fixed, by trying all orders of all groups."""
    groups = [way.tp for name, way in stage.items() if name not in fixed for _ in range(way.dp)]
    taken = {device for name, devices in fixed.items() for device in devices}

    def place(left, free):
        if not left:
            return True
        starts = range(0, host.devices, left[0])
        ranges = (set(range(start, start + left[0])) for start in starts)
        return any(place(left[1:], free - devices) for devices in ranges if devices <= free)

    return place(sorted(groups, reverse=True), set(range(host.devices)) - taken)


def test_no_cheaper_set_could_move():
    rng = random.Random(1)
    host, moved_some = Host(8, 4), 0
    for _ in range(300):
        order = rng.sample(range(8), 8)
        running, stage = {}, {}
        for name in "abc":
            if order and rng.random() < 0.7:
                running[name] = (order.pop(),)
                stage[name] = Parallel(1, 1)
        room = 8 - len(running)
        for name in "xyz":
            way = rng.choice((Parallel(1, 1), Parallel(1, 2), Parallel(2, 2), Parallel(1, 4)))
            if way.gpus <= room:
                stage[name], room = way, room - way.gpus
        cost = {name: float(rng.randint(1, 9)) for name in running}
        chosen = choose_gpus(stage, running, cost, host)
        devices = [device for of_one in chosen.values() for device in of_one]
        assert len(devices) == len(set(devices)) and set(chosen) == set(stage)
        for name, way in stage.items():
            for start in range(0, way.gpus, way.tp):
                group = chosen[name][start : start + way.tp]
                assert group == tuple(range(group[0], group[0] + way.tp)) and group[0] % way.tp == 0
        moved = [name for name in running if chosen[name] != running[name]]
        moved_some += bool(moved)
        price = sum(cost[name] for name in moved)
        for size in range(len(running) + 1):
            for others in itertools.combinations(running, size):
                fixed = {name: devices for name, devices in running.items() if name not in others}
                if sum(cost[name] for name in others) < price:
                    assert not fits(stage, fixed, host)
    assert moved_some > 20
