"""One iteration's attention against the arithmetic of its tables."""

import numpy as np
import pytest

from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.profile import LayerTables, Table
from xprofiler.roofline import roofline_profile
from xsimulator.cost.stage import iteration_attention


@pytest.fixture(scope="module")
def separate():
    """A layer whose prompts and decoding have kernels of their own."""
    return roofline_profile(builtin_model("opt-13b"), parse_cluster("1xA40"), "fp16").degree(1).decoder


@pytest.fixture(scope="module")
def mixed(separate):
    """A layer with one kernel for both, in which a prompt takes longer beside decoding than alone."""
    axes = ("chunk", "past", "decodes", "context")
    points = ((0.0, 100.0), (0.0, 100.0), (0.0, 8.0), (0.0, 100.0))
    grid = np.meshgrid(*points, indexing="ij")
    chunk, past, decodes, context = grid
    seconds = 3.0 * chunk + 2.0 * chunk * past + 5.0 * decodes * context + chunk * decodes
    return LayerTables(
        separate.rest,
        separate.encode_attention,
        separate.chunk_attention,
        Table(("batch", "context"), points[2:], tuple((5.0 * decodes * context)[0, 0].ravel().tolist())),
        Table(axes, points, tuple(seconds.ravel().tolist())),
    )


def test_separate_kernels_add_up(separate):
    lengths = [100.0, 700.0, 300.0]
    prompts = float(np.mean(separate.encode_attention(3.0, np.array(lengths))))
    assert iteration_attention(separate, lengths, [0.0, 0.0, 0.0], 0, 0.0) == pytest.approx(prompts)
    chunk, decode = separate.chunk_attention(50.0, 640.0), separate.decode_attention(12, 900.0)
    both = iteration_attention(separate, [*lengths, 50.0], [0.0, 0.0, 0.0, 640.0], 12, 900.0)
    assert both == pytest.approx(prompts + float(chunk) + float(decode))


def test_one_kernel_for_both_takes_the_longest_piece_beside_the_decoding(mixed):
    assert iteration_attention(mixed, [], [], 4, 50.0) == pytest.approx(5 * 4 * 50)
    alone = 3 * 20 + 2 * 20 * 10
    assert iteration_attention(mixed, [20.0], [10.0], 0, 0.0) == pytest.approx(alone)
    two = iteration_attention(mixed, [20.0, 30.0], [10.0, 0.0], 4, 50.0)
    assert two == pytest.approx(5 * 4 * 50 + alone + 3 * 30 + 30 * 4)


def test_nothing_to_do_takes_no_time(separate, mixed):
    assert iteration_attention(separate, [], [], 0, 0.0) == 0.0
    assert iteration_attention(mixed, [], [], 0, 0.0) == 0.0
