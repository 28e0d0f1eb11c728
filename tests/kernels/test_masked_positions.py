"""Attention leaves masked positions out: what a block holds beside a sequence's own tokens changes nothing."""

import math

import pytest
import torch

from exegpt.kernels.attention import attention, attention_reference
from exegpt.kernels.kv_layout import key_shape
from exegpt.kernels.kv_write import kv_write, kv_write_reference
from exegpt.kernels.rotary import rotate_and_write, rotate_and_write_reference

from .gpu import cache_there, needs_triton, there
from .test_attention_variants import BIAS

GARBAGE = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0])
SIZES = {
    "decoding": ((1, 1, 1), (1, 16, 37)),
    "prompts": ((5, 1, 33), (5, 1, 33)),
    "chunks": ((7, 1, 20), (40, 18, 36)),
}
OPTIONS = {
    "causal": {},
    "window": {"window": 9},
    "starts": {"starts": 12},
    "whole": {"causal": False, "scale": 1.0, "bias": BIAS[:4]},
}


def on_gpu(q, keys, values, tables, offsets, contexts, **options):
    from exegpt.kernels.attention_gpu import attention_gpu

    options = {name: there(o) if isinstance(o, torch.Tensor) else o for name, o in options.items()}
    cache = cache_there(keys, values, tables, offsets, contexts)
    return attention_gpu(there(q), *cache, torch.empty_like(there(q)), **options).cpu()


ATTENTION = {
    "cpu": attention,
    "reference": attention_reference,
    "triton": pytest.param(on_gpu, marks=needs_triton),
    "triton in splits": pytest.param(lambda *args, **kwargs: on_gpu(*args, splits=3, **kwargs), marks=needs_triton),
}
kernels = pytest.mark.parametrize("attend", ATTENTION.values(), ids=ATTENTION.keys())


def batch(news, contexts, garbage=None, kv_heads=2, head_size=16, block_size=16, broken=()):
    """Queries and a cache that is filled with zeros or garbage, each element with some of it, before the sequences'
    tokens are written; `broken` are the places of the first sequence's tokens whose keys and values are NaN.
    """
    g, filling = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
    blocks = [-(-context // block_size) for context in contexts]
    values = torch.zeros(sum(blocks) + 1, kv_heads, block_size, head_size)
    keys = torch.zeros(key_shape(values))
    if garbage is not None:
        keys, values = (garbage[torch.randint(len(garbage), t.shape, generator=filling)] for t in (keys, values))
    tables = torch.zeros(len(contexts), max(blocks), dtype=torch.int32)
    order = torch.randperm(sum(blocks), generator=g).add(1).tolist()  # block 0, of padding, is nobody's
    for i, context in enumerate(contexts):
        table = [order.pop() for _ in range(blocks[i])]
        tables[i, : len(table)] = torch.tensor(table)
        k, v = torch.randn(2, context, kv_heads, head_size, generator=g)
        for place in broken if i == 0 else ():
            k[place] = v[place] = math.nan
        places = torch.arange(context)
        kv_write(k, v, keys, values, tables[i, places // block_size].long() * block_size + places % block_size)
    q = torch.randn(sum(news), 2 * kv_heads, head_size, generator=g)
    offsets = torch.tensor([0, *news], dtype=torch.int32).cumsum(0).int()
    return q, keys, values, tables, offsets, torch.tensor(contexts, dtype=torch.int32)


INTERPRETED = {"triton": ("causal", "window"), "triton in splits": ("starts", "whole")}
"""Options of the interpreted kernels that a commit waits for: each case takes a second."""


def cases():
    """Every kernel with every option."""
    for name, given in ATTENTION.items():
        attend, marks = (given.values[0], given.marks) if name in INTERPRETED else (given, ())
        for option, options in OPTIONS.items():
            late = () if option in INTERPRETED.get(name, OPTIONS) else (pytest.mark.slow,)
            yield pytest.param(attend, options, id=f"{option}-{name}", marks=(*marks, *late))


@pytest.mark.parametrize(("attend", "options"), cases())
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_result_does_not_depend_on_what_blocks_held(attend, sizes, options):
    if "starts" in options:  # below every new token's place
        starts = [min(options["starts"], context - new) for new, context in zip(*sizes, strict=True)]
        options = {"starts": torch.tensor(starts, dtype=torch.int32)}
    expected = attend(*batch(*sizes), **options)
    assert expected.isfinite().all()
    assert torch.equal(attend(*batch(*sizes, GARBAGE), **options), expected)
    assert torch.equal(attend(*batch(*sizes, GARBAGE[3:4]), **options), expected)


@kernels
@pytest.mark.parametrize("window", [None, 5])
def test_a_broken_token_reaches_the_queries_that_see_it_and_no_other(attend, window):
    sizes = (20, 1), (20, 30)
    expected = attend(*batch(*sizes), window=window)
    got = attend(*batch(*sizes, broken=(11,)), window=window)
    sees = torch.zeros(21, dtype=torch.bool)
    sees[11 : 11 + (window or 9)] = True
    assert got[sees].isnan().all()
    torch.testing.assert_close(got[~sees], expected[~sees], atol=2e-6, rtol=1e-5)


@kernels
@pytest.mark.parametrize("of", ["keys", "values"])
def test_a_decoding_sequence_that_sees_nan_gets_nan(attend, of):
    q, keys, values, *rest = batch((1, 1), (20, 30))
    block = rest[0][0, 0]
    if of == "keys":
        keys[block, :, :, 4] = -math.nan  # with a sign, as x86 makes it
    else:
        values[block, :, 4] = math.nan
    got = attend(q, keys, values, *rest)
    assert got[0].isnan().all() and got[1].isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("written_by", ["kv_write", "rotate_and_write"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=needs_triton)])
def test_a_value_that_is_not_finite_is_stored_as_zeros_with_a_key_of_nan(device, written_by, value):
    k, v, q = torch.randn(3, 5, 2, 8)
    v[3, 1, 6] = value
    angles = torch.randn(9, 4)
    rotation = torch.arange(5), angles.cos(), angles.sin()
    slots = torch.tensor([0, 9, 4, 2, 11])

    def written(write, rotate, keys, values, move):
        if written_by == "kv_write":
            write(move(k), move(v), keys, values, move(slots))
        else:
            rotate(*(move(t.clone()) for t in (q, k, v)), *map(move, rotation), keys, values, move(slots))
        return keys.cpu(), values.cpu()

    plain = torch.zeros(3, 2, 8, 4), torch.zeros(3, 2, 4, 8)
    keys, values = written(kv_write_reference, rotate_and_write_reference, *plain, lambda tensor: tensor)
    assert keys[0, 1, :, 2].isnan().all() and not values[0, 1, 2].any()
    assert keys.isnan().sum() == 8 and values.isfinite().all()
    if device == "cpu":
        got = written(kv_write, rotate_and_write, *(torch.zeros_like(t) for t in plain), lambda tensor: tensor)
    else:
        from exegpt.kernels.kv_write_gpu import kv_write_gpu
        from exegpt.kernels.rotary_gpu import rotate_and_write_gpu

        empty = there(torch.zeros(3, 2, 4, 8)), there(torch.zeros(3, 2, 4, 8))
        got = written(kv_write_gpu, rotate_and_write_gpu, *empty, there)
        got = got[0].mT, got[1]
    torch.testing.assert_close(got, (keys, values), equal_nan=True)
