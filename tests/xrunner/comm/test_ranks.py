"""Messages between ranks arrive as they were sent, and none is unpickled."""

import json

import pytest

from tests.xrunner.cells import disaggregated, requests, schedule
from xcore import document
from xcore.specs.model import ModelSpec
from xrunner.comm.ranks import Ranks

REFUSING = """
import sys
from mpi4py import MPI

def refuse(*_):
    raise AssertionError("pickled")

MPI.pickle.__init__(refuse, refuse)
"""
"""Nothing that goes over MPI can be pickled or unpickled."""

EXCHANGE = (
    REFUSING
    + """
import json
import numpy as np
from xcore.document import read, to_dict
from xcore.requests.request import Request
from xcore.specs.schedule import Schedule
from xrunner.comm.ranks import job

with job() as ranks:
    mine, size = ranks.rank, ranks.size
    request = Request(f"r{mine}", tuple(range(1000 * mine)), 3)
    received = ranks.all((mine, request if mine != 1 else None), Request)
    assert [number for number, _ in received] == list(range(size))
    assert [item.prompt_ids if item else None for _, item in received] == [
        tuple(range(1000 * rank)) if rank != 1 else None for rank in range(size)
    ]
    gathered = ranks.gather(np.full(mine, mine), 1)
    assert [array.tolist() for array in gathered] == [[rank] * rank for rank in range(size) if mine == 1]
    values = [([(i, request)], {("rank", i): 0.5}) for i in range(size)] if mine == 0 else None
    dealt, named = ranks.deal(values, Request)
    assert list(dealt) == [(mine, Request("r0", (), 3))] and named == {("rank", mine): 0.5}
    plan = ranks.share(lambda: read(Schedule, sys.argv[1]), Schedule)
    assert plan == read(Schedule, sys.argv[1]), plan
    assert ranks.share(lambda: None) is None
    try:
        ranks.all(request)
    except KeyError as error:
        assert "Request" in str(error)
    else:
        raise AssertionError("a kind that isn't named is refused")
    try:
        MPI.pickle.dumps(request)
    except AssertionError as error:
        assert str(error) == "pickled"
    else:
        raise RuntimeError("nothing is refused")
"""
)


def test_three_ranks_receive_what_was_sent(job, directories, tmp_path):
    plan = schedule(ModelSpec.from_directory(directories["llama"]))
    document.write(tmp_path / "schedule.json", plan)
    done = job(3, "-c", EXCHANGE, tmp_path / "schedule.json")
    assert done.returncode == 0, done.stderr


def test_a_single_rank_receives_its_own_values():
    ranks = Ranks()
    assert ranks.all((1, "x")) == [(1, "x")] and ranks.gather(2, 0) == [2]
    assert ranks.deal([3]) == 3 and ranks.share(lambda: 4) == 4


@pytest.mark.parametrize("command", ["run", pytest.param("bench", marks=pytest.mark.slow)])
def test_commands_pickle_nothing(job, directories, tmp_path, command):
    """Replicas, whose results go from one to the other; and disaggregated sides, where rank 0 isn't the leader."""
    spec = ModelSpec.from_directory(directories["llama"])
    plan = schedule(spec, replicas=2) if command == "run" else disaggregated(spec, (1,), (1,))
    document.write(tmp_path / "schedule.json", plan)
    lines = [{"id": r.id, "prompt_ids": list(r.prompt_ids), "max_tokens": r.max_tokens} for r in requests()]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(line | {"ignore_eos": True}) + "\n" for line in lines))
    program = REFUSING + "from exegpt.cli import main\nsys.exit(main(sys.argv[1:]))"
    options = ["--model", directories["llama"], "--schedule", tmp_path / "schedule.json", "--profile", "roofline"]
    done = job(2, "-c", program, command, *options, "--requests", tmp_path / "requests.jsonl", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    answer = answer["policies"][0] if command == "bench" else answer
    assert answer["requests"] == len(lines) and answer["tokens"] == sum(r.max_tokens for r in requests())


@pytest.mark.parametrize(
    ("bound", "quota", "threads"),
    [
        (((0, 1), (0, 1)), None, 1),  # unbound ranks of a job on two CPUs of many
        (((0, 1, 2, 3), (4, 5, 6, 7)), None, 4),
        (((0,), (1,)), None, 1),
        ((range(8), range(8)), None, 4),
        ((range(8), range(8)), 4.0, 2),
        ((range(8), range(8)), 1.0, 1),
    ],
)
def test_ranks_share_the_cpus_that_they_may_use_together(monkeypatch, bound, quota, threads):
    class Node:
        size = 2

        def Allgather(self, mine, gathered):
            gathered[:] = (0, 1)

    class OfTwo(Ranks):
        def all(self, value, *kinds):
            return [value, (value[0], tuple(bound[1]))]

    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(bound[0]))
    monkeypatch.setattr("xcore.usable_cpus.cpu_quota", lambda: quota)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert OfTwo(type("World", (), {"rank": 0})(), Node()).threads() == threads
