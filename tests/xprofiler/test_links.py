"""Ways between ranks: which are taken, and the clock of those between GPUs; the moving itself is in test_ranks.py."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from xcore.specs.builtin_models import builtin_model
from xprofiler import job, links
from xprofiler.measured_cluster import found_cluster
from xprofiler.points import FULL
from xrunner.comm import direct
from xrunner.comm.ranks import Agreed, Ranks

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Two:
    """Two ranks of one node, of which the other has the same to say but for its device."""

    size, rank, host, per_node, nodes = 2, 0, "here", 2, ((0, 1),)

    def __init__(self, other):
        self.other = other

    def all(self, value, *kinds):
        return [value, (self.host, self.other) if isinstance(value, tuple) else value]

    def agree(self, facts):
        return facts()


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(links, "identity", lambda device: "GPU-a")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(links, "DirectLinks", lambda *given: given)


def test_a_gpu_for_each_rank_goes_directly(gpus):
    ranks = Two("GPU-b")
    assert links.make_links(ranks, ((0, 1),), GPU) == (ranks, ((0, 1),), GPU)


def test_cpus_and_single_ranks_go_through_host_memory(gpus):
    assert isinstance(links.make_links(Two("cpu"), (), CPU), links.HostLinks)
    assert isinstance(links.make_links(Ranks(), (), GPU), links.HostLinks)


def test_ranks_that_share_a_gpu_are_refused(gpus):
    with pytest.raises(Agreed, match=r"2 ranks share fewer GPUs.*one rank for each GPU"):
        links.make_links(Two("GPU-a"), (), GPU)


def test_gpus_without_nccl_are_refused(gpus, monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(links.InputError, match=r"has no NCCL.*profile one GPU with one rank"):
        links.make_links(Two("GPU-b"), (), GPU)


def test_the_transport_names_the_degrees_whose_small_sums_go_by_symmetric_memory(monkeypatch):
    monkeypatch.setattr(direct, "join", lambda ranks, backend: None)
    monkeypatch.setattr(dist, "new_group", lambda members, backend: members)
    groups = []

    def group_sum(ranks, group, device):
        groups.append(group)
        return SimpleNamespace(symmetric=len(group) != 4)

    monkeypatch.setattr(links, "GroupSum", group_sum)
    ranks = SimpleNamespace(rank=5, nodes=(tuple(range(8)),))
    ways = links.DirectLinks(ranks, (), GPU)
    assert ways.how == "NCCL between GPUs"
    assert all(ways.all_reduce(tp) for tp in (2, 4, 8)) and groups == [[4, 5], [4, 5, 6, 7], list(range(8))]
    assert ways.how == "NCCL between GPUs, all-reduces up to 1 MiB by symmetric memory at degrees 2, 8"


def test_a_jobs_profile_without_symmetric_memory_is_kept_apart(monkeypatch):
    def path():
        return job._path(builtin_model("llama-3.1-8b"), "bf16", Two("GPU-b"), CPU, FULL, "triton")

    paths = [path()]
    for value in ("1", "0"):
        monkeypatch.setenv("EXEGPT_SYMM_MEM", value)
        paths.append(path())
    assert paths[0] == paths[1] != paths[2]


def test_calls_are_queued_at_once_and_timed_from_the_second_on(monkeypatch):
    now, order = [0.0], []

    def event(enable_timing):
        at = SimpleNamespace(ms=None, synchronize=lambda: order.append("waited"))
        at.record = lambda: setattr(at, "ms", now[0])
        at.elapsed_time = lambda end: end.ms - at.ms
        return at

    def call():
        order.append("queued")
        now[0] += 100.0 if order.count("queued") < 3 else 2.0  # who comes first waits for the others

    monkeypatch.setattr(torch.cuda, "Event", event)
    timing = links.DirectLinks.time(None, call)
    assert timing.seconds == pytest.approx(0.002) and timing.spread == 0
    assert order[-1] == "waited" and order.count("waited") == 1


def test_ranks_share_a_nodes_memory_but_not_their_gpus(monkeypatch):
    from xprofiler import machine

    def local(on):
        device = SimpleNamespace(memory_bytes=80, bandwidth_bytes_s=2.0, flops_s={"fp32": 1.0})
        return SimpleNamespace(device=device)

    monkeypatch.setattr(machine, "local", local)
    monkeypatch.setattr("xprofiler.measured_cluster.replace", lambda one, **new: SimpleNamespace(**(vars(one) | new)))
    ranks = Two(None)
    assert found_cluster(ranks, None, None, CPU).device.memory_bytes == 40
    assert found_cluster(ranks, None, None, GPU).device.memory_bytes == 80
