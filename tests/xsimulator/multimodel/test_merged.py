"""Merged blocks of several models, and what sharing costs."""

from xsimulator.multimodel.merged import merged_blocks, merged_pools, sharing_overhead


def test_overhead_by_whether_blocks_are_alike():
    assert sharing_overhead([8]) == 1.0
    assert sharing_overhead([8, 8]) == 1.04
    assert sharing_overhead([8, 5]) == 1.08


def test_there_must_be_room_for_the_longest_sequence_of_every_model():
    """Three blocks of 4 bytes fit one of 12; ten of them need four merged blocks, beside two of the larger model."""
    assert merged_blocks(6 * 12, [12, 4], [2, 10]).total == 6
    assert merged_blocks(6 * 12 - 1, [12, 4], [2, 10]) is None


def test_pools_draw_on_one_memory():
    large, small = merged_pools(100, [12, 4], 16)
    assert (large.total, small.total) == (8, 24)
    large.allocate(6)
    assert small.available == 6
    held = small.allocate(4)
    assert (large.available, small.available) == (0, 2)
    small.free(held)
    assert large.available == 2
