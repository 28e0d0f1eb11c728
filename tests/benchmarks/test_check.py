"""The checks of kernels: each mistake is found at every size, and what is right but for rounding passes with room."""

from dataclasses import replace

import pytest
import torch

from benchmarks.kernels.case import TINY
from benchmarks.kernels.cases import attention_cases, cache_cases, row_cases, sampling_cases
from benchmarks.kernels.check import check, compare
from benchmarks.kernels.telling import Choice, telling_attention, telling_sampling
from exegpt.kernels import attention, kv_blocks, norm, rotary, sampling, swiglu
from exegpt.kernels.philox import arrival_times

CPU = torch.device("cpu")
HALF = (torch.bfloat16, torch.float16)
BLOCK = 16
QUERIES, KV_HEADS, SIZE = 8, 2, 64
SIZES = [(1, 40), (1, 257), (1, 4_100), (1, 33_000), (1, 140_001), (19, 19), (300, 300), (37, 700)]
"""New tokens, context: decoding, prompts, and a part of a prompt."""


@pytest.fixture(scope="module")
def inputs():
    """q, k and v by size."""
    torch.manual_seed(0)
    return {size: telling_attention(QUERIES, KV_HEADS, SIZE, *size, SIZE**-0.5, torch.float16, CPU) for size in SIZES}


def attend(q, k, v, scale=SIZE**-0.5, lost=None, late=0, weights=None):
    """Attention in float64 [new, heads, size]: without the keys `lost`, and each token's `late` last ones (but the
    first of all); weights rounded to a dtype as kernels in half precision do."""
    (new, _, size), (context, kv_heads, _) = q.shape, k.shape
    scores = torch.einsum("nghd,cgd->nghc", q.double().view(new, kv_heads, -1, size), k.double()) * scale
    places = torch.arange(context)
    unseen = places > (places[context - new :] - late).clamp(min=0)[:, None]
    if lost is not None:
        unseen = unseen | (places >= lost.start) & (places < lost.stop)
    scores = scores.masked_fill(unseen[:, None, None], -torch.inf)
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    rounded = p if weights is None else p.to(weights).double()
    return (torch.einsum("nghc,cgd->nghd", rounded, v.double()) / p.sum(-1, keepdim=True)).reshape(q.shape)


def exchanged_blocks(t, a, b):
    """Keys or values as they are found by a table with two entries exchanged; unused places hold something else."""
    blocks = torch.cat((t, torch.randn(-len(t) % BLOCK, *t.shape[1:]).to(t.dtype))).split(BLOCK)
    order = list(range(len(blocks)))
    order[a], order[b] = order[b], order[a]
    return torch.cat([blocks[i] for i in order])[: len(t)]


def strange_block(t, a):
    """Keys or values with one block of another sequence."""
    t = t.clone()
    there = slice(a * BLOCK, (a + 1) * BLOCK)
    t[there] = t[there].flip(0) * (torch.randint(0, 2, t[there].shape) * 2 - 1)
    return t


def heads_exchanged(out):
    return out[:, [1, 0, *range(2, out.shape[1])]]


def middle(k):
    return len(k) // BLOCK // 2


MISTAKES = {
    "zeros": lambda q, k, v: torch.zeros(q.shape),
    "the first split dropped": lambda q, k, v: attend(q, k, v, lost=slice(0, max(1, len(k) // 8))),
    "a split dropped": lambda q, k, v: attend(q, k, v, lost=slice(len(k) // 2, len(k) // 2 + max(2, len(k) // 16))),
    "the last split dropped": lambda q, k, v: attend(q, k, v, lost=slice(len(k) - max(1, len(k) // 8), len(k))),
    "two blocks exchanged": lambda q, k, v: attend(q, *(exchanged_blocks(t, 0, -1) for t in (k, v))),
    "a block of another sequence": lambda q, k, v: attend(q, *(strange_block(t, middle(k)) for t in (k, v))),
    "values of another block": lambda q, k, v: attend(q, k, strange_block(v, middle(k))),
    "scores 3 % too large": lambda q, k, v: attend(q, k, v, scale=1.03 * SIZE**-0.5),
    "scores 3 % too small": lambda q, k, v: attend(q, k, v, scale=0.97 * SIZE**-0.5),
    "results 3 % too large": lambda q, k, v: 1.03 * attend(q, k, v),
    "last token missing": lambda q, k, v: attend(q, k, v, late=1),
    "two heads exchanged": lambda q, k, v: heads_exchanged(attend(q, k, v)),
    "one row wrong": lambda q, k, v: attend(q, k, v).index_fill(1, torch.tensor([5]), 0.0),
}


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_mistakes_in_attention_are_found(inputs, size):
    q, k, v = inputs[size]
    expected = attend(q, k, v)
    for name, mistake in MISTAKES.items():
        got = mistake(q, k, v)
        if name == "the last split dropped" and len(q) > 1:
            continue  # some tokens would see nothing at all, and give no numbers
        if name == "the first split dropped" and len(q) == len(k):
            continue
        for dtype in HALF:
            assert not compare(got.to(dtype), expected, dtype).passed, name


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_roundings_in_attention_pass_with_room(inputs, size, dtype):
    q, k, v = inputs[size]
    verdict = compare(attend(q, k, v, weights=dtype).to(dtype), attend(q, k, v), dtype)
    assert verdict.error < verdict.row_error < 0.5 * verdict.allowed


def exchange_entries(tables, contexts):
    """The last two entries of every sequence's table exchanged."""
    tables = tables.clone()
    for row, context in zip(tables, contexts.tolist(), strict=True):
        last = (context - 1) // BLOCK
        if last:
            row[[last - 1, last]] = row[[last, last - 1]]
    return tables


WRONG_BATCHES = {
    "scale": lambda q, k, v, t, o, c, scale: (q, k, v, t, o, c, 1.03 * scale),
    "two blocks exchanged": lambda q, k, v, t, o, c, scale: (q, k, v, exchange_entries(t, c), o, c, scale),
    "keys of other heads": lambda q, k, v, t, o, c, scale: (q, k.flip(1), v, t, o, c, scale),
    "queries of other heads": lambda q, k, v, t, o, c, scale: (q.flip(1), k, v, t, o, c, scale),
}
ODD = replace(TINY, prompts=(2, 37), window=9, decoding=((2, 40), (1, 1030)))


@pytest.mark.parametrize("mistake", WRONG_BATCHES)
def test_mistakes_in_every_attention_case_are_found(monkeypatch, mistake):
    """Windows, biases, parts of prompts: the cases as the commands check them."""

    def wrong(q, keys, values, tables, offsets, contexts, out=None, *, scale=None, work=None, **options):
        scale = scale or q.shape[2] ** -0.5
        *batch, scale = WRONG_BATCHES[mistake](q, keys, values, tables, offsets, contexts, scale)
        return attention.attention_reference(*batch, scale=scale, **options)

    monkeypatch.setattr(attention, "attention", wrong)
    for case in attention_cases(ODD, torch.bfloat16, CPU):
        assert not check(case).passed, f"{case.name}, {case.shape}"


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("cases", [row_cases, cache_cases, sampling_cases, attention_cases])
def test_what_is_right_passes_with_room(cases, dtype):
    """On the CPU, where these dtypes take the plain references: in the dtype itself, and in float32."""
    for case in cases(ODD, dtype, CPU):
        verdict = check(case)
        assert verdict.error <= verdict.row_error <= 0.6 * verdict.allowed, case.name


def normed(change):
    """A norm whose arguments are changed, as (x, weight, …, epsilon, residual)."""
    plains = {"rms_norm": norm.rms_norm_reference, "layer_norm": norm.layer_norm_reference}
    return {name: lambda *given, plain=plain: plain(*change(*given)) for name, plain in plains.items()}


WRONG_NORMS = {
    "no epsilon": normed(lambda x, *given: (x, *given[:-2], 1e-12, given[-1])),
    "residual not added": normed(lambda x, *given: (x, *given[:-1], None)),
    "residual alone": normed(lambda x, *given: (torch.zeros_like(x), *given)),
    "no weight": normed(lambda x, weight, *given: (x, torch.ones_like(weight), *given)),
    "weights of neighbours": normed(lambda x, weight, *given: (x, weight.roll(1), *given)),
}


@pytest.mark.parametrize("mistake", WRONG_NORMS)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_mistakes_in_norms_are_found(monkeypatch, mistake, dtype):
    for name, wrong in WRONG_NORMS[mistake].items():
        monkeypatch.setattr(norm, name, wrong)
    for sizes in (ODD, replace(ODD, hidden=4096, rows=2)):
        for case in row_cases(sizes, dtype, CPU):
            if "Norm" in case.name and ("residual" in case.name or not mistake.startswith("residual")):
                assert not check(case).passed, case.name


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, plain: plain(x.roll(x.shape[1] // 2, 1)),  # gate and up exchanged
        lambda x, plain: plain(x) * 1.03,
        lambda x, plain: plain(x).roll(1, 1),
        lambda x, plain: plain(torch.cat((x[:-1], 0 * x[-1:]))),
    ],
)
def test_mistakes_in_gates_are_found(monkeypatch, wrong):
    monkeypatch.setattr(swiglu, "swiglu", lambda x: wrong(x, swiglu.swiglu_reference))
    monkeypatch.setattr(swiglu, "geglu", lambda x: wrong(x, swiglu.geglu_reference))
    gates = [case for case in row_cases(ODD, torch.bfloat16, CPU) if "GLU" in case.name]
    assert len(gates) == 2 and not any(check(case).passed for case in gates)


def test_one_gate_for_another_is_found(monkeypatch):
    monkeypatch.setattr(swiglu, "geglu", swiglu.swiglu_reference)
    (case,) = [case for case in row_cases(ODD, torch.bfloat16, CPU) if case.name == "GEGLU"]
    assert not check(case).passed


WRONG_ROTATIONS = {
    "the other way": lambda q, k, v, p, cos, sin, keys, values, s: (q, k, v, p, cos, -sin, keys, values, s),
    "one position on": lambda q, k, v, p, cos, sin, keys, values, s: (q, k, v, p + 1, cos, sin, keys, values, s),
    "keys not rotated": lambda q, k, v, p, cos, sin, keys, values, s: (q, k, v, p * 0, cos, sin, keys, values, s),
    "slots exchanged": lambda q, k, v, p, cos, sin, keys, values, s: (q, k, v, p, cos, sin, keys, values, s.flip(0)),
    "keys as values": lambda q, k, v, p, cos, sin, keys, values, s: (q, k, k.clone(), p, cos, sin, keys, values, s),
}


@pytest.mark.parametrize("mistake", WRONG_ROTATIONS)
def test_mistakes_in_rotations_are_found(monkeypatch, mistake):
    plain = rotary.rotate_and_write_reference
    monkeypatch.setattr(rotary, "rotate_and_write", lambda *given: plain(*WRONG_ROTATIONS[mistake](*given)))
    cases = [case for case in cache_cases(ODD, torch.bfloat16, CPU) if case.name == "RoPE and cache"]
    assert cases and not any(check(case).passed for case in cases)


def test_copies_of_blocks_must_be_exact(monkeypatch):
    """One bit in one layer, a block less."""

    def gather(cache, blocks, buffer):
        for tensor, part in zip(cache, buffer, strict=True):
            torch.index_select(tensor.flatten(1), 0, blocks, out=part)
        buffer[-1, -1, -1] += buffer[-1, -1, -1].abs() / 128  # one bit in bfloat16

    def scatter(buffer, cache, targets):
        for tensor, part in zip(cache, buffer, strict=True):
            tensor.flatten(1).index_copy_(0, targets[:-1], part[:-1])

    for name, wrong in {"gather_blocks": gather, "scatter_blocks": scatter}.items():
        monkeypatch.setattr(kv_blocks, name, wrong)
    cases = [case for case in cache_cases(ODD, torch.bfloat16, CPU) if case.name.startswith("blocks")]
    assert len(cases) == 2 and not any(check(case).passed for case in cases)


CHOICES = {
    "temperature": Choice(0.8),
    "top-k": Choice(0.8, 5),
    "top-p": Choice(1.0, 0, 0.9),
    "top-k, top-p": Choice(0.8, 40, 0.8),
    "penalty": Choice(1.0, 0, 0.9, 1.2),
}


def drawn(logits, how, more_k=0, more_p=0):
    """Sampling in float64, keeping so many tokens more than top-k and top-p do."""
    x, penalty = logits.double(), how.penalty.double()[:, None]
    x = torch.where(how.seen[how.slot] > 0, torch.where(x < 0, x * penalty, x / penalty), x) / how.temperature[:, None]
    log_times = arrival_times(how.seed, how.position, x.shape[1]).double().log()
    tokens = []
    for row, log_time, k, p in zip(x, log_times, how.top_k.tolist(), how.top_p.tolist(), strict=True):
        best = row.sort(descending=True).values
        if 0 < k < len(row):
            best = best[best >= best[k - 1 + more_k]]
        share = best.softmax(0)
        if p < 1:
            best = best[: int((share.cumsum(0) - share < p).sum()) + more_p]
        tokens.append((row - log_time).where(row >= best[-1], -torch.inf).argmax())
    return torch.stack(tokens)


@pytest.mark.parametrize("rows", [2, 3, 40])
@pytest.mark.parametrize("vocab", [99, 5_000])
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_mistakes_in_sampling_are_found(name, rows, vocab, dtype):
    choice = CHOICES[name]
    logits, how = telling_sampling(choice, rows, vocab, dtype, CPU)
    expected = sampling.sample_reference(logits, how)
    assert torch.equal(drawn(logits, how), expected) and torch.equal(sampling.sample(logits, how), expected)
    wrong = {
        "another seed": drawn(logits, replace(how, seed=how.seed + 1)),
        "another position": drawn(logits, replace(how, position=how.position + 1)),
    }
    if choice.top_k and choice.top_p == 1:
        wrong |= {"top-k and one": drawn(logits, how, more_k=1), "top-k but one": drawn(logits, how, more_k=-1)}
    if choice.top_p < 1:
        wrong |= {"top-p and one": drawn(logits, how, more_p=1), "top-p but one": drawn(logits, how, more_p=-1)}
    if choice.penalty != 1:
        wrong["no penalty"] = drawn(logits, replace(how, penalty=torch.ones_like(how.penalty)))
        if rows > 3:
            wrong["another's tokens"] = drawn(logits, replace(how, slot=how.slot.roll(1)))
    for mistake, got in wrong.items():
        assert not compare(got, expected, None).passed, mistake


@pytest.mark.parametrize("rows", [1, 2, 300])
def test_one_wrong_token_is_one_too_many(rows):
    tokens = torch.randint(0, 1000, (rows,))
    other = tokens.clone()
    other[-1] += 1
    assert compare(tokens.clone(), tokens, None).passed and not compare(other, tokens, None).passed


def test_rows_of_zeros_must_be_zeros():
    expected = torch.tensor([[0.0, 0.0], [1e-30, 1.0]])
    assert compare(expected.bfloat16(), expected, torch.bfloat16).passed
    got = expected.clone()
    got[0, 0] = 1e-20
    assert compare(got.bfloat16(), expected, torch.bfloat16).row_error == float("inf")
    assert not compare(torch.full((2, 2), float("nan")).bfloat16(), expected, torch.bfloat16).passed
    assert not compare(torch.full((2, 2), float("inf")).bfloat16(), expected, torch.bfloat16).passed
    assert not compare(expected, expected, torch.bfloat16).passed
    assert not compare(expected[:1].bfloat16(), expected, torch.bfloat16).passed
