"""A job's tokens are the same by the transports of GPUs as by host memory alone; which transport is taken."""

import json
from collections import deque
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from exegpt.document import to_dict
from exegpt.errors import InputError
from exegpt.model import ModelSpec
from exegpt.models import load_model
from exegpt.models.create import create_model
from xrunner import direct, engine, staged
from xrunner.direct import pairs
from xrunner.engine import Engine
from xrunner.place import Place, ranks_needed
from xrunner.transport import CACHE, STATES

from .cells import SIZES, apart, requests, schedule
from .stand_in import StandIn


@pytest.fixture(scope="module")
def paths(directories, tmp_path_factory):
    t5 = tmp_path_factory.mktemp("models") / "t5"
    create_model(t5, "t5", seed=11, **SIZES)
    return directories | {"t5": t5}


def two_ranks(paths):
    """Cells by name, of stages, of shards and of two sides."""
    specs = {arch: ModelSpec.from_directory(paths[arch]) for arch in ("llama", "t5")}
    cells = {}
    for arch, spec in specs.items():
        cells |= {
            f"{arch}-stages": (arch, schedule(spec, "orca", (1, 1))),
            f"{arch}-shards": (arch, schedule(spec, "rra", (2,))),
            f"{arch}-sides": (arch, apart(spec, (1,), (1,))),
        }
    return cells


@pytest.mark.parametrize("way", ["staged", "direct"])
@pytest.mark.parametrize("some", ["llama-sides", pytest.param("", marks=pytest.mark.slow)])
def test_tokens_are_those_of_one_rank(job, paths, tmp_path, way, some):
    lengths = [(1, 9), (17, 1), (40, 20), (5, 12), (64, 6), (33, 2), (2, 15)]
    todo = requests(lengths)
    cells = {name: cell for name, cell in two_ranks(paths).items() if name.startswith(some)}
    given = {
        name: {"model": str(paths[arch]), "schedule": to_dict(plan), "requests": [to_dict(one) for one in todo]}
        for name, (arch, plan) in cells.items()
    }
    (tmp_path / "cells.json").write_text(json.dumps(given))
    done = job(2, "-m", "mpi4py", "-m", "tests.xrunner.ways", way, tmp_path)
    assert done.returncode == 0, done.stderr
    models = {arch: load_model(paths[arch]) for arch, _ in cells.values()}
    alone = {arch: Engine(model, schedule(model.spec, "orca")).run(todo).results for arch, model in models.items()}
    for name, (arch, _) in cells.items():
        found = json.loads((tmp_path / f"{name}.json").read_text())["results"]
        want = {result.id: list(result.output_ids) for result in alone[arch]}
        assert {result["id"]: result["output_ids"] for result in found} == want, name


class Together:
    """Ranks of which all have said the same or, with `others`, those."""

    def __init__(self, size, others=()):
        self.size, self.rank, self.host, self.others = size, 0, "here", others

    def all(self, value):
        return [value, *(self.others or [value] * (self.size - 1))]


def chosen(monkeypatch, ranks):
    made = []
    monkeypatch.setattr(direct, "DirectTransport", lambda *given: made.append("direct"))
    monkeypatch.setattr(engine, "StagedTransport", lambda *given: made.append("staged"))
    spec = ModelSpec("m", "llama", 4, 64, 8, 4, 8, 96, True, 300, 96)
    gpu = SimpleNamespace(device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=0))
    engine.make_transport(ranks, Place(schedule(spec, "rra", (1, 1)), 0), gpu)
    return made[0]


def test_gpus_of_their_own_talk_directly(monkeypatch):
    own, shared = ("here", "1", True), ("here", "0", True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert chosen(monkeypatch, Together(2, [own])) == "direct"
    assert chosen(monkeypatch, Together(2, [("there", "0", True)])) == "direct"
    assert chosen(monkeypatch, Together(2, [shared])) == "staged"
    assert chosen(monkeypatch, Together(2, [(*own[:2], False)])) == "staged"
    monkeypatch.setenv("EXEGPT_NCCL", "0")
    assert chosen(monkeypatch, Together(2, [own])) == "staged"


def test_devices_that_cannot_be_connected(monkeypatch):
    def broken(ranks, backend):
        raise RuntimeError("no route\nat all")

    monkeypatch.setattr(direct, "join", broken)
    spec = ModelSpec("m", "llama", 4, 64, 8, 4, 8, 96, True, 300, 96)
    ranks = SimpleNamespace(rank=0, size=2, world=None)
    with pytest.raises(InputError, match=r"can't connect .*no route\).*EXEGPT_NCCL=0"):
        direct.DirectTransport(ranks, schedule(spec, "rra", (1, 1)), spec, (), torch.device("cpu"))


def test_all_that_talk_meet_in_one_order():
    spec = ModelSpec("m", "llama", 7, 64, 8, 4, 8, 96, True, 300, 96)
    plan = apart(spec, (1, 2), (2, 1))
    met = pairs([Place(plan, rank) for rank in range(ranks_needed(plan))], spec)
    assert met == sorted(met)
    assert {(a, b) for tag, a, b in met if tag == STATES} == {(0, 1), (0, 2), (3, 5)}
    carried = {(a, b) for tag, a, b in met if tag == CACHE}
    assert carried and all(a < 3 <= b for a, b in carried)


def test_copies_leave_in_order():
    """What was sent later isn't sent earlier, and nothing before its copy has come."""
    sent = []
    gpu = StandIn()
    world = SimpleNamespace(Isend=lambda data, to, tag: sent.append((bytes(data)[0], to)) or DONE)
    transport = staged.StagedTransport(SimpleNamespace(world=world), (0,), (), gpu)
    transport.send(torch.full((4,), 0, dtype=torch.uint8), 1, STATES)
    assert not sent
    for value in (1, 2):
        transport.send(torch.full((4,), value, dtype=torch.uint8), 1, STATES)
    transport.close()
    assert sent == [(0, 1), (1, 1), (2, 1)]


DONE = SimpleNamespace(Test=lambda: True)


def test_ways_end_in_one_order_on_every_rank(monkeypatch):
    ended = []
    monkeypatch.setattr(dist, "destroy_process_group", ended.append)
    transport = object.__new__(direct.DirectTransport)
    transport._sending, transport._leaving, transport._group = deque(), deque(), None
    transport.meanwhile = None
    sums, states, cache = (OfHash(number) for number in (1, 2, 0))  # a set has them in another order
    transport._sums, transport._ways = sums, {STATES: states, CACHE: cache}
    transport.close()
    assert ended == [states, cache, sums]


class OfHash:
    def __init__(self, number):
        self.number = number

    def __hash__(self):
        return self.number
