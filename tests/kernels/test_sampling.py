"""Sampling: kernel for the CPU, Triton kernel and plain reference against each other, transformers and chance."""

from dataclasses import replace

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exegpt.kernels.logit_edits import LogitEdits, edit_logits, edit_logits_reference
from exegpt.kernels.philox import arrival_times, philox
from exegpt.kernels.sampling import Sampling, sample, sample_reference

from .gpu import needs_triton, there


def state(history, vocab):
    """The slots and the sampling state of rows whose sequences have these tokens, int64 [rows, most]; -1 is none."""
    slots = torch.arange(len(history)).flip(0)
    seen = torch.zeros(len(history), vocab + 1, dtype=torch.uint8)
    seen[slots] = torch.zeros_like(seen).scatter(1, history.where(history >= 0, vocab), 1)
    return slots, seen[:, :vocab].contiguous()


def sampling(rows, temperature=1.0, top_k=0, top_p=1.0, penalty=1.0, seed=0, seen=None, min_p=None):
    """The same for all rows, which are one sequence's places."""
    return Sampling(
        torch.full((rows,), float(temperature)),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), float(top_p)),
        torch.full((rows,), float(penalty)),
        torch.full((rows,), seed),
        torch.arange(rows),
        *(seen or (torch.zeros(rows, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.uint8))),
        None if min_p is None else torch.full((rows,), float(min_p)).log(),
    )


def mixed(rows, vocab, seed=0):
    """Logits, and rows that all sample in another way."""
    g = torch.Generator().manual_seed(seed)

    def any_of(*values):
        return torch.tensor(values)[torch.randint(0, len(values), (rows,), generator=g)]

    logits = torch.randn(rows, vocab, generator=g) * 4
    return logits, Sampling(
        any_of(0.0, 0.1, 0.7, 1.0, 3.0),
        any_of(0, 1, 2, 5, 50, 10**6).int(),
        any_of(0.0, 0.1, 0.5, 0.9, 0.99, 1.0),
        any_of(0.5, 1.0, 1.3),
        torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g),
        torch.randint(0, 10**6, (rows,), generator=g),
        *state(torch.randint(-1, vocab, (rows, 6), generator=g), vocab),
    )


def only(how, rows):
    """The sampling of some rows."""
    rest = {name: value[rows] for name, value in vars(how).items() if name not in ("seen", "log_min_p", "edits")}
    log_min_p = None if how.log_min_p is None else how.log_min_p[rows]
    return Sampling(**rest, seen=how.seen, log_min_p=log_min_p, edits=how.edits and edits_of(how.edits, rows))


def packed(allowed):
    """Masks bool [masks, vocab] as `LogitEdits.allowed`."""
    bits = numpy.packbits(numpy.pad(allowed.numpy(), ((0, 0), (0, -allowed.shape[1] % 32))), axis=1, bitorder="little")
    return torch.from_numpy(bits.view(numpy.int32))


def edits_of(edits, rows):
    """The edits of these rows alone, which get their places."""
    place = {row: i for i, row in enumerate(rows)}
    kept = [i for i, row in enumerate(edits.rows.tolist()) if row in place]
    biases = [i for i, row in enumerate(edits.biased[0].tolist()) if row in place]
    by_row = {name: getattr(edits, name)[kept] for name in ("penalty", "frequency", "presence", "slot", "mask")}
    rows_left = torch.tensor([place[row] for row in edits.rows[kept].tolist()], dtype=torch.int64)
    biased = edits.biased[:, biases].clone()
    biased[0] = torch.tensor([place[row] for row in biased[0].tolist()], dtype=torch.int64)
    return replace(edits, rows=rows_left, **by_row, biased=biased, bias=edits.bias[biases])


def edited(rows, vocab, seed=0):
    """`mixed` with min-p, and with edits of every kind of about two rows in three."""
    logits, how = mixed(rows, vocab, seed)
    g = torch.Generator().manual_seed(seed + 1)
    chosen = torch.randperm(rows, generator=g)[: -(-2 * rows // 3)]
    n = len(chosen)

    def any_of(*values):
        return torch.tensor(values)[torch.randint(0, len(values), (n,), generator=g)]

    masks = torch.rand(2, vocab, generator=g) < 0.5
    masks[:, vocab // 2] = True
    tokens = torch.randint(0, vocab, (rows,), generator=g)
    biases = [
        (row, int(tokens[row]), value)
        for row, value in zip(chosen.tolist()[::2], (5.0, -100.0, 1.5) * rows, strict=False)
    ]
    counts = torch.randint(0, 4, how.seen.shape, generator=g, dtype=torch.int32)
    edits = LogitEdits(
        chosen,
        any_of(0.5, 1.0, 1.3),
        any_of(-2.0, 0.0, 0.25, 2.0),
        any_of(-0.5, 0.0, 2.0),
        how.slot[chosen],
        any_of(-1, 0, 1),
        packed(masks),
        torch.tensor([[row for row, *_ in biases], [token for _, token, _ in biases]], dtype=torch.int64),
        torch.tensor([value for *_, value in biases]),
        how.seen,
        counts * (counts > 1),
    )
    penalty = how.penalty.index_fill(0, chosen, 1.0)
    min_p = torch.tensor([0.0, 0.02, 0.3, 1.0])[torch.randint(0, 4, (rows,), generator=g)]
    return logits, replace(how, penalty=penalty, log_min_p=min_p.log(), edits=edits)


def over_there(how):
    """A sampling on the device of the tests."""
    moved = {name: there(value) for name, value in vars(how).items() if name != "edits"}
    return Sampling(**moved, edits=how.edits and LogitEdits(*there(*vars(how.edits).values())))


@pytest.mark.parametrize(
    ("seed", "counter", "words"),
    [
        (0, (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (-1, (0xFFFFFFFF,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_its_authors_answers(seed, counter, words):
    drawn_words = philox(*(torch.tensor([value]) for value in (seed, *counter)))
    assert " ".join(f"{word.item():08x}" for word in drawn_words) == words


def test_arrival_times_are_exponential():
    times = arrival_times(torch.arange(50), torch.zeros(50, dtype=torch.int64), 4000)
    assert times.min() > 0
    torch.testing.assert_close(times.mean(), torch.tensor(1.0), atol=0.01, rtol=0)
    for quantile in (1e-4, 0.01, 0.5, 0.99):
        edge = -torch.log1p(torch.tensor(-quantile))
        share = (times < edge).float().mean()
        assert abs(share - quantile) < 5 * (quantile / times.numel()) ** 0.5


@settings(max_examples=40)
@given(st.integers(1, 12), st.integers(1, 700), st.integers(0, 10**6))
def test_kernel_and_reference_choose_alike(rows, vocab, seed):
    logits, how = mixed(rows, vocab, seed)
    assert sample(logits, how).tolist() == sample_reference(logits, how).tolist()


@pytest.mark.parametrize("seed", range(6))
def test_many_pieces_of_equal_and_of_ruled_out_logits(seed):
    """Steps of an eighth: many are equal to the k-th, and shares of the mass are met at the same place."""
    logits, how = mixed(8, 5003, seed)
    logits = (logits * 8).round() / 8
    logits[:, torch.randperm(5003, generator=torch.Generator().manual_seed(seed))[:2000]] = -torch.inf
    assert sample(logits, how).tolist() == sample_reference(logits, how).tolist()


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(1, torch.float32), (130, torch.bfloat16), (130, torch.float16), (9001, torch.float32)]
)
@needs_triton
def test_the_triton_kernel_chooses_alike(vocab, dtype):
    from exegpt.kernels.sampling_gpu import sample_gpu

    logits, how = mixed(6, vocab)
    logits = logits.to(dtype)
    on_gpu = over_there(how)
    assert sample_gpu(there(logits), on_gpu).tolist() == sample_reference(logits, how).tolist()


@settings(max_examples=5)
@given(st.integers(1, 1000), st.integers(0, 1000))
@needs_triton
def test_the_triton_kernel_with_many_pieces_of_a_row(vocab, seed):
    from exegpt.kernels.sampling_gpu import sample_gpu

    logits, how = mixed(3, vocab, seed)
    on_gpu = over_there(how)
    assert sample_gpu(there(logits), on_gpu, block_size=64).tolist() == sample_reference(logits, how).tolist()


@pytest.mark.parametrize("seed", range(4))
@needs_triton
def test_the_triton_kernel_with_equal_and_with_ruled_out_logits(seed):
    """Steps of a quarter, both zeros among them: many are equal to the k-th, and shares are met at the same place."""
    from exegpt.kernels.sampling_gpu import sample_gpu

    logits, how = mixed(8, 1003, seed)
    logits = (logits * 4).round() / 4
    logits[:, torch.randperm(1003, generator=torch.Generator().manual_seed(seed))[:400]] = -torch.inf
    logits[0] = -torch.inf
    logits[1, ::2] = 0.0
    logits[1, 1::2] = -0.0
    got = sample_gpu(there(logits), over_there(how), block_size=256)
    assert got.tolist() == sample_reference(logits, how).tolist()


@pytest.mark.parametrize("k", [50, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2, 49, 99))])
@needs_triton
def test_the_triton_kernel_finds_the_kth_greatest(k):
    """Rows of logits that differ by one bit, of both signs, and one with both zeros in the middle."""
    from exegpt.kernels.sampling_gpu import sample_gpu

    order = torch.randperm(100, generator=torch.Generator().manual_seed(k))
    steps = (0x3F800000 + torch.arange(100, dtype=torch.int32)).view(torch.float32)
    rows = [steps, -steps]
    rows.append(torch.cat((torch.linspace(-1, -0.1, 49), torch.tensor([-0.0, 0.0]), torch.linspace(0.1, 1, 49))))
    logits = torch.stack([row.sort().values[order] for row in rows])
    how = sampling(len(rows) * 8, top_k=k, seed=11)
    wide = logits.repeat(8, 1)
    got = sample_gpu(there(wide), over_there(how), block_size=32)
    assert got.tolist() == sample_reference(wide, how).tolist()


@needs_triton
def test_the_triton_kernel_without_a_penalty_and_with_a_view():
    from exegpt.kernels.sampling_gpu import sample_gpu

    logits, how = torch.randn(2, 70)[:, 10:60], sampling(2)
    on_gpu = over_there(how)
    assert sample_gpu(there(logits), on_gpu).tolist() == sample(logits, how).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.6},
        {"top_k": 7},
        {"top_p": 0.8},
        {"penalty": 1.4},
        {"min_p": 0.15},
        {"min_p": 0.05, "top_p": 0.7, "temperature": 0.9},
        {"temperature": 1.3, "min_p": 0.1, "top_k": 20, "top_p": 0.6, "penalty": 1.2},
    ],
    ids=lambda options: "-".join(options),
)
def test_transformers_keeps_the_same_tokens(options):
    from transformers.generation import logits_process as theirs

    rows, vocab = 60, 101
    g = torch.Generator().manual_seed(3)
    logits, history = torch.randn(rows, vocab, generator=g) * 3, torch.randint(0, vocab, (rows, 9), generator=g)
    steps = [
        theirs.RepetitionPenaltyLogitsProcessor(options.get("penalty", 1.0)),
        theirs.TemperatureLogitsWarper(options.get("temperature", 1.0)),
        theirs.MinPLogitsWarper(options.get("min_p", 0.0)),
        theirs.TopKLogitsWarper(options.get("top_k", vocab)),
        theirs.TopPLogitsWarper(options.get("top_p", 1.0)),
    ]
    scores = logits.clone()
    for step in steps:
        scores = step(history, scores)
    how = sampling(rows, seed=5, seen=state(history, vocab), **options)
    reference = (scores - arrival_times(how.seed, how.position, vocab).log()).argmax(1)
    assert sample(logits, how).tolist() == reference.tolist()


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0}, {"top_k": 4}, {"top_p": 0.7}])
def test_tokens_come_as_often_as_they_should(options):
    from scipy.stats import chisquare  # here: it takes half a second in each of the tests' processes

    rows, vocab = 20_000, 11
    logits = (torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 1.5).repeat(rows, 1)
    x = logits[0] / options.get("temperature", 1.0)
    best, order = x.softmax(0).sort(descending=True)
    kept = torch.arange(vocab) < (options.get("top_k") or vocab)
    kept &= best.cumsum(0) - best < options.get("top_p", 1.0)
    share = torch.zeros(vocab).scatter(0, order, best * kept)
    drawn = sample(logits, sampling(rows, seed=9, **options)).bincount(minlength=vocab)
    assert not drawn[share == 0].any()
    expected = share[share > 0].double()
    assert chisquare(drawn[share > 0].double(), expected / expected.sum() * rows).pvalue > 1e-3


def test_a_rows_token_does_not_depend_on_its_batch():
    logits, how = mixed(12, 300)
    together = sample(logits, how).tolist()
    alone = [sample(logits[i : i + 1], only(how, [i])).item() for i in range(12)]
    assert together == alone
    assert sample(logits, how).tolist() == together


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(1, 400), st.integers(0, 10**6), st.data())
def test_edited_rows_choose_alike_in_any_batch(rows, vocab, seed, data):
    """The kernels and the reference agree, in the whole batch and in any choice of its rows, in any order."""
    logits, how = edited(rows, vocab, seed)
    together = sample(logits, how).tolist()
    assert together == sample_reference(logits, how).tolist()
    chosen = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, unique=True))
    assert sample(logits[chosen], only(how, chosen)).tolist() == [together[row] for row in chosen]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_edited_logits_are_those_of_numpy(dtype):
    """In vLLM's order: mask, bias, repetition, frequency and presence penalty; the logits given stay as they are."""
    logits, how = edited(9, 131, seed=4)
    logits = logits.to(dtype)
    before, e = logits.clone(), how.edits
    want = logits.float().numpy().astype(numpy.float64)
    bits = numpy.unpackbits(e.allowed.numpy().view(numpy.uint8), axis=1, bitorder="little")[:, :131]
    for i, row in enumerate(e.rows.tolist()):
        if e.mask[i] >= 0:
            want[row, bits[e.mask[i]] == 0] = -numpy.inf
    for (row, token), bias in zip(e.biased.T.tolist(), e.bias.tolist(), strict=True):
        want[row, token] += bias
    for i, row in enumerate(e.rows.tolist()):
        seen, counts = e.seen[e.slot[i]].numpy() > 0, e.counts[e.slot[i]].numpy()
        x, penalty = want[row], e.penalty[i].item()
        x = numpy.where(seen, numpy.where(x < 0, x * penalty, x / penalty), x)
        want[row] = x - e.frequency[i].item() * counts - e.presence[i].item() * (counts > 0)
    for edit in (edit_logits, edit_logits_reference):
        numpy.testing.assert_allclose(edit(logits, e).numpy(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, before)
    assert len({*e.mask.tolist()}) == 3 and e.biased.shape[1] > 1 and (e.frequency == 0).any(), "edits of every kind"


@pytest.mark.parametrize(("vocab", "dtype"), [(1, torch.float32), (130, torch.bfloat16), (1003, torch.float32)])
@needs_triton
def test_the_triton_kernels_edit_alike(vocab, dtype):
    from exegpt.kernels.logit_edits import _biased
    from exegpt.kernels.logit_edits_gpu import edit_rows_gpu
    from exegpt.kernels.sampling_gpu import sample_gpu

    logits, how = edited(7, vocab, seed=2)
    logits, on_gpu = logits.to(dtype), over_there(how)
    x = _biased(there(logits), on_gpu.edits)
    edit_rows_gpu(x, on_gpu.edits, block_size=256)
    torch.testing.assert_close(x.cpu(), edit_logits_reference(logits, how.edits), rtol=1e-6, atol=1e-5)
    got = sample_gpu(x, replace(on_gpu, edits=None), block_size=256)
    assert got.tolist() == sample_reference(logits, how).tolist()


def test_places_and_seeds_draw_anew():
    logits = torch.zeros(400, 1000)
    assert len(set(sample(logits, sampling(400)).tolist())) > 250
    one_place = sampling(400)
    by_seed = Sampling(**{**vars(one_place), "position": one_place.seed, "seed": one_place.position})
    assert len(set(sample(logits, by_seed).tolist())) > 250


def test_greedy_takes_the_first_of_equals_and_applies_the_penalty():
    logits = torch.zeros(2, 1200)
    logits[:, [700, 40, 1100]] = 2.0
    how = sampling(2, temperature=0, penalty=1.5, seen=state(torch.tensor([[-1, -1], [40, 40]]), 1200))
    for choose in (sample, sample_reference):
        assert choose(logits, how).tolist() == [40, 700]


def test_tokens_that_are_ruled_out_never_come():
    logits = torch.full((200, 40), -torch.inf)
    logits[:, [3, 17]] = torch.tensor([0.0, -1.0])
    for options in ({}, {"top_k": 5}, {"top_p": 0.99}, {"top_k": 1}):
        for choose in (sample, sample_reference):
            assert set(choose(logits, sampling(200, **options)).tolist()) == (
                {3} if options == {"top_k": 1} else {3, 17}
            )
