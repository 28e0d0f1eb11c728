"""A job's tokens are the same by the transports of GPUs as by host memory alone; which transport is taken."""

import json
from collections import defaultdict, deque
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.xrunner.cells import SIZES, disaggregated, requests, schedule
from tests.xrunner.stand_in import StandIn
from tests.xrunner.ways import read_log
from xcore.document import to_dict
from xcore.errors import InputError
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import ranks_needed
from xrunner.comm import direct, staged
from xrunner.comm.direct import pairs
from xrunner.comm.place import Place
from xrunner.comm.transport import CACHE, STATES
from xrunner.core import job_setup
from xrunner.core.engine import Engine
from xrunner.models import load_model
from xrunner.models.create import create_model


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
            f"{arch}-sides": (arch, disaggregated(spec, (1,), (1,))),
        }
    return cells


@pytest.mark.parametrize("way", [pytest.param("staged", marks=pytest.mark.slow), "direct"])
@pytest.mark.parametrize("some", ["llama-sides", pytest.param("", marks=pytest.mark.slow)])
def test_tokens_are_those_of_one_rank(job, paths, tmp_path, way, some):
    lengths = [(1, 9), (17, 1), (40, 20), (5, 12), (64, 6), (33, 2), (2, 15)]
    todo = requests(lengths)
    cells = {name: cell for name, cell in two_ranks(paths).items() if name.startswith(some)}
    runs = {
        name: {"model": str(paths[arch]), "schedule": to_dict(plan), "requests": [to_dict(request) for request in todo]}
        for name, (arch, plan) in cells.items()
    }
    (tmp_path / "cells.json").write_text(json.dumps(runs))
    done = job(2, "-m", "mpi4py", "-m", "tests.xrunner.ways", way, tmp_path)
    assert done.returncode == 0, done.stderr
    models = {arch: load_model(paths[arch]) for arch, _ in cells.values()}
    alone = {arch: Engine(model, schedule(model.spec, "orca")).run(todo).results for arch, model in models.items()}
    for name, (arch, _) in cells.items():
        results = json.loads((tmp_path / f"{name}.json").read_text())["results"]
        expected = {result.id: list(result.output_ids) for result in alone[arch]}
        assert {result["id"]: result["output_ids"] for result in results} == expected, name
    check_logs(tmp_path, direct=way == "direct")


def check_logs(folder, direct):
    """No receive is posted before its sender has begun, and no communicator ends before its graphs."""
    logs = [read_log(folder, rank) for rank in range(2)]
    pairs = 0
    for me, other in ((0, 1), (1, 0)):
        sent, received = defaultdict(list), defaultdict(list)
        for rank, kind, moments in ((other, "isend", sent), (me, "irecv", received)):
            for _, peer, group, moment in [line for line in logs[rank] if line[0] == kind]:
                assert peer == (me if rank == other else other)
                moments[group].append(moment)
        assert {group: len(moments) for group, moments in sent.items()} == {g: len(m) for g, m in received.items()}
        for group, moments in sent.items():
            assert all(begun < posted for begun, posted in zip(moments, received[group], strict=True))
            pairs += len(moments)
    assert bool(pairs) == direct
    for log in logs:
        assert next(line[0] for line in log if line[0] in ("drop", "destroy")) == "drop"


@pytest.mark.slow
def test_graphs_end_before_communicators_when_a_run_is_refused(job, directories, tmp_path):
    done = job(2, "-m", "mpi4py", "-m", "tests.xrunner.refusing", directories["llama"], tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        (drop, captured), *ends = (line for line in read_log(tmp_path, rank) if line[0] in ("drop", "destroy"))
        assert drop == "drop" and captured and ends == [["destroy"]]


class Together:
    """Ranks that all send the same or, with `others`, those."""

    def __init__(self, size, others=()):
        self.size, self.rank, self.host, self.others = size, 0, "here", others

    def all(self, value):
        return [value, *(self.others or [value] * (self.size - 1))]


def chosen(monkeypatch, ranks):
    transports = []
    monkeypatch.setattr(direct, "DirectTransport", lambda *given: transports.append("direct"))
    monkeypatch.setattr(job_setup, "StagedTransport", lambda *given: transports.append("staged"))
    spec = ModelSpec("m", "llama", 4, 64, 8, 4, 8, 96, True, 300, 96)
    gpu = SimpleNamespace(device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=0))
    job_setup.make_transport(ranks, Place(schedule(spec, "rra", (1, 1)), 0), gpu)
    return transports[0]


def test_gpus_of_their_own_talk_directly(monkeypatch):
    alone_there, shared = ("here", "1", True), ("here", "0", True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert chosen(monkeypatch, Together(2, [alone_there])) == "direct"
    assert chosen(monkeypatch, Together(2, [("there", "0", True)])) == "direct"
    assert chosen(monkeypatch, Together(2, [shared])) == "staged"
    assert chosen(monkeypatch, Together(2, [(*alone_there[:2], False)])) == "staged"
    monkeypatch.setenv("EXEGPT_NCCL", "0")
    assert chosen(monkeypatch, Together(2, [alone_there])) == "staged"


def test_devices_that_cannot_be_connected(monkeypatch):
    def broken(ranks, backend):
        raise RuntimeError("no route\nat all")

    monkeypatch.setattr(direct, "join", broken)
    spec = ModelSpec("m", "llama", 4, 64, 8, 4, 8, 96, True, 300, 96)
    ranks = SimpleNamespace(rank=0, size=2, world=object())
    with pytest.raises(InputError, match=r"can't connect .*no route\).*EXEGPT_NCCL=0"):
        direct.DirectTransport(ranks, schedule(spec, "rra", (1, 1)), spec, (), StandIn())


def test_pairs_of_ranks_connect_in_one_order():
    spec = ModelSpec("m", "llama", 7, 64, 8, 4, 8, 96, True, 300, 96)
    plan = disaggregated(spec, (1, 2), (2, 1))
    met = pairs([Place(plan, rank) for rank in range(ranks_needed(plan))], spec)
    assert met == sorted(met)
    assert {(a, b) for tag, a, b in met if tag == STATES} == {(0, 1), (0, 2), (3, 5)}
    carried = {(a, b) for tag, a, b in met if tag == CACHE}
    assert carried and all(a < 3 <= b for a, b in carried)


def test_receives_are_posted_in_order_once_their_senders_have_begun(monkeypatch):
    posted, notes = [], []

    def said_by_mpi(data, source, tag):
        notes.append(SimpleNamespace(there=False, Test=lambda: notes[place].there))
        place = len(notes) - 1
        return notes[place]

    work = SimpleNamespace(is_completed=lambda: True, wait=lambda: None)
    monkeypatch.setattr(dist, "irecv", lambda tensor, source, group: posted.append((id(tensor), source, group)) or work)
    transport = object.__new__(direct.DirectTransport)
    vars(transport).update(_coming={}, _communicators={CACHE: "cache"}, _world=SimpleNamespace(Irecv=said_by_mpi))
    first, second = (torch.zeros(1) for _ in range(2))
    pending = [transport.expect(tensor, 3, CACHE) for tensor in (first, second)]
    assert not transport.arrived(pending[0]) and not transport.arrived(pending[1]) and not posted
    notes[0].there = True
    assert not transport.arrived(pending[1]) and posted == [(id(first), 3, "cache")]
    notes[1].there = True
    assert transport.arrived(pending[1]) and transport.arrived(pending[0])
    assert posted == [(id(first), 3, "cache"), (id(second), 3, "cache")]


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
    transport.gpu = SimpleNamespace(drop_graphs=lambda: ended.append("graphs"))
    sums, states, cache = (OfHash(number) for number in (1, 2, 0))  # a set has them in another order
    transport._group_communicator, transport._communicators = sums, {STATES: states, CACHE: cache}
    transport.close()
    assert ended == ["graphs", states, cache, sums]


class OfHash:
    def __init__(self, number):
        self.number = number

    def __hash__(self):
        return self.number
