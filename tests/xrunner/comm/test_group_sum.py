"""Sums over a group of GPUs: which tensors go by symmetric memory, where it is available, and that all ranks agree.

The stand-in for torch's symmetric memory lives in this process, a thread for each rank; the communicator adds likewise.
"""

import inspect
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symm_mem

from tests.xrunner.stand_in import StandIn
from xrunner.comm import group_sum
from xrunner.comm.group_sum import LIMIT_BYTES, GroupSum

CUDA = torch.device("cuda", 0)
ONE_NODE = ((0, 1),)


class Job:
    """Ranks of one group, each a thread, with torch's symmetric memory as this machine can't have it.

    A rank's memory is poisoned as soon as the one-shot kernel no longer needs it, and the kernel reads the others' only
    between its two barriers.
    """

    def __init__(self, size=2, nodes=None):
        self.size, self.nodes = size, nodes or (tuple(range(size)),)
        self.barrier = threading.Barrier(size, timeout=5)
        self.values, self.buffers, self.calls = [None] * size, {}, []
        self.here = threading.local()
        self.broken = {}
        """What fails on which rank: "empty", "rendezvous"; "offset" comes from a pool."""

    def all_gather(self, value):
        self.barrier.wait()
        self.values[self.here.rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values

    def run(self, work):
        """`work(ranks)` on every rank, ranks' results in order."""
        results, errors = [None] * self.size, []

        def rank(number):
            self.here.rank = number
            try:
                ranks = SimpleNamespace(rank=number, size=self.size, nodes=self.nodes, all=self.all_gather)
                results[number] = work(ranks)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def fail(self, what):
        if self.broken.get(what) == self.here.rank:
            raise RuntimeError(f"no {what}")

    def empty(self, *size, dtype=None, device=None):
        self.fail("empty")
        assert device == CUDA
        return torch.empty(*size, dtype=dtype)

    def rendezvous(self, tensor, group):
        assert group == "group"
        assert all(self.all_gather("rendezvous")), "all are here"
        self.fail("rendezvous")
        self.buffers[self.here.rank] = tensor
        return SimpleNamespace(offset=2**20 if self.broken.get("offset") == self.here.rank else 0)

    def one_shot_all_reduce(self, input, reduce_op, group_name):
        assert (reduce_op, group_name) == ("sum", "group") and input.is_contiguous() and input.nbytes % 4 == 0
        assert input.dtype in (torch.float32, torch.bfloat16), "the kernel has no other"
        buffer = self.buffers[self.here.rank]
        assert input.data_ptr() == buffer.data_ptr() and input.storage_offset() == 0
        self.note("one shot", input)
        self.barrier.wait()
        total = sum(self.buffers[rank][: input.nbytes].view(input.dtype) for rank in range(self.size))
        self.barrier.wait()
        buffer.fill_(0xA5)
        return total.view(input.shape)

    def all_reduce(self, x, group):
        assert group.group_name == "group"
        self.note("nccl", x)
        x.copy_(sum(self.all_gather(x.clone())))
        self.barrier.wait()

    def note(self, how, x):
        if self.here.rank == 0:
            self.calls.append((how, x.nbytes))

    def sum(self, ranks):
        return GroupSum(ranks, GROUP, CUDA)


GROUP = SimpleNamespace(group_name="group")


@pytest.fixture
def job(monkeypatch):
    def make(size=2, **options):
        job = Job(size, **options)
        for name in ("empty", "rendezvous"):
            monkeypatch.setattr(symm_mem, name, getattr(job, name))
        monkeypatch.setattr(symm_mem, "get_backend", lambda device: "CUDA")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        ops = SimpleNamespace(one_shot_all_reduce=job.one_shot_all_reduce)
        monkeypatch.setattr(torch.ops, "symm_mem", ops)
        monkeypatch.setattr(dist, "all_reduce", job.all_reduce)
        monkeypatch.setattr(dist, "get_world_size", lambda group: size)
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(size)))
        return job

    return make


def test_the_stand_in_has_torchs_signatures():
    schema = torch.ops.symm_mem.one_shot_all_reduce.default._schema  # registered in builds without CUDA, too
    assert str(schema) == "symm_mem::one_shot_all_reduce(Tensor input, str reduce_op, str group_name) -> Tensor"
    assert [arg.name for arg in schema.arguments] == list(inspect.signature(Job().one_shot_all_reduce).parameters)
    for name in ("empty", "rendezvous"):
        theirs, ours = (inspect.signature(call).parameters for call in (getattr(symm_mem, name), getattr(Job(), name)))
        assert [(p.name, p.kind, p.default) for p in theirs.values()] == [
            (p.name, p.kind, p.default) for p in ours.values()
        ]
    assert symm_mem.get_backend(torch.device("cpu")) is None
    assert "offset" in dir(symm_mem._SymmetricMemory)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_sums_follow_each_other_in_one_buffer(job, size):
    job = job(size)
    shapes = [(4, 64), (1, 8), (3, 40), (4, 64)]

    def work(ranks):
        total = job.sum(ranks)
        assert total.symmetric
        generator = torch.Generator().manual_seed(ranks.rank)
        tensors = [torch.randint(-9, 9, shape, generator=generator).bfloat16() for shape in shapes]
        return [(x.clone(), total(x)) for x in tensors]

    ranks = job.run(work)
    for at in range(len(shapes)):
        expected = sum(rank[at][0] for rank in ranks)
        assert all(torch.equal(rank[at][1], expected) for rank in ranks)
    assert [how for how, _ in job.calls] == ["one shot"] * len(shapes)


@pytest.mark.parametrize(
    ("dtype", "elements", "how"),
    [
        (torch.bfloat16, LIMIT_BYTES // 2, "one shot"),
        (torch.bfloat16, LIMIT_BYTES // 2 + 8, "nccl"),
        (torch.float32, LIMIT_BYTES // 4, "one shot"),
        (torch.float32, LIMIT_BYTES // 4 + 4, "nccl"),
        (torch.float32, 4, "one shot"),
        (torch.float32, 1, "nccl"),  # 4 bytes: the warm-up's vote
        (torch.bfloat16, 7, "nccl"),
        (torch.bfloat16, 12, "nccl"),
        (torch.float16, 64, "nccl"),
        (torch.float64, 64, "nccl"),
        (torch.int64, 64, "nccl"),
        (torch.float32, 0, "nccl"),
    ],
)
def test_the_way_follows_from_size_and_dtype(job, dtype, elements, how):
    job = job()
    sums = job.run(lambda ranks: job.sum(ranks)(torch.full((1, elements), ranks.rank + 1).to(dtype)))
    for total in sums:
        assert total.dtype == dtype and torch.equal(total, torch.full((1, elements), 3).to(dtype))
    assert [used for used, _ in job.calls] == [how]


def test_a_view_of_any_alignment_is_copied(job):
    job = job()
    (first, second) = job.run(lambda ranks: job.sum(ranks)(torch.arange(33.0)[1:]))
    assert torch.equal(first, 2 * torch.arange(1.0, 33)) and torch.equal(first, second)
    assert job.calls == [("one shot", 128)]


def check_all_by_nccl(job):
    def work(ranks):
        total = job.sum(ranks)
        assert not total.symmetric
        return total(torch.ones(64))

    assert all(torch.equal(total, torch.full((64,), 2.0)) for total in job.run(work))
    assert job.calls == [("nccl", 256)]


@pytest.mark.parametrize("what", ["empty", "rendezvous", "offset"])
def test_all_ranks_use_the_communicator_where_one_must(job, what):
    job = job()
    job.broken[what] = 1
    check_all_by_nccl(job)
    assert bool(job.buffers) == (what != "empty"), "none is alone at the rendezvous"


def test_a_torch_without_it_and_a_gpu_without_the_kernels_dtypes(job, monkeypatch):
    with monkeypatch.context() as patch:
        job_here = job()
        patch.delattr(symm_mem, "get_backend")
        check_all_by_nccl(job_here)
    with monkeypatch.context() as patch:
        job_here = job()
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        check_all_by_nccl(job_here)


def test_it_can_be_turned_off(job, monkeypatch):
    monkeypatch.setenv("EXEGPT_SYMM_MEM", "0")
    check_all_by_nccl(job())


def test_a_group_across_nodes(job):
    check_all_by_nccl(job(nodes=((0,), (1,))))


def test_a_rank_without_a_group_takes_part_in_the_vote(job):
    """A job whose third rank has no group to sum over: the others have theirs as if it weren't there."""
    job = job(2)
    votes = []
    third = SimpleNamespace(rank=2, size=3, nodes=((0, 1, 2),), all=lambda value: votes.append(value) or [True, value])
    alone = GroupSum(third, None, CUDA)
    x = torch.ones(4)
    assert alone.symmetric and alone(x) is x and votes == [True, True]


def test_a_graph_captures_it(job):
    """Replays read the tensor's content at that time, and none asks anything of the host."""
    job = job()

    def work(ranks):
        total, x, out, gpu = job.sum(ranks), torch.zeros(64), torch.zeros(64), StandIn()
        gpu.begin_graphs()
        replay = gpu.capture(lambda: out.copy_(total(x)))
        groups = []
        for step in range(3):
            x.fill_(step + ranks.rank)
            replay()
            groups.append(out[0].item())
        return groups

    assert job.run(work) == [[1.0, 3.0, 5.0]] * 2


def test_on_this_machines_cpu_there_is_none(monkeypatch):
    """With torch's own module: its first query returns False and raises nothing."""
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    ranks = SimpleNamespace(rank=0, size=2, nodes=ONE_NODE, all=lambda value: [value, value])
    assert not GroupSum(ranks, GROUP, torch.device("cpu")).symmetric
    with pytest.raises(RuntimeError, match="sm_80"):
        group_sum._allocated(ranks, GROUP, torch.device("cpu"))
