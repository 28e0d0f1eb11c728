"""What is checked, timed and compiled: each kernel on some shapes, beside its reference and what else is public.

A case's tensors are made when it is, and freed with it: go through them one at a time.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.kernels import peers
from benchmarks.kernels.case import BLOCK_SIZE, Case, Heads, Make, Sizes
from benchmarks.kernels.telling import Choice, telling_attention, telling_sampling
from exegpt.kernels import (
    attention,
    attention_flashinfer,
    kv_blocks,
    kv_write,
    logit_edits,
    norm,
    rotary,
    sampling,
    swiglu,
)
from exegpt.kernels.attention_flashinfer import FlashInfer
from exegpt.kernels.kv_layout import key_shape
from xrunner.models.cache import scattered_zeros


def all_cases(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Every kernel on some shapes."""
    for make in (row_cases, cache_cases, sampling_cases, edit_cases, attention_cases):
        yield from make(sizes, dtype, device)


def attention_cases(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Prompts, chunks of prompts, decoding, windows, both-ways attention with a position bias; further head sizes. By
    Triton, and then by FlashInfer where it can.
    """

    def case(
        name: str, heads: Heads, news: tuple[int, ...], contexts: tuple[int, ...], **options: Any
    ) -> Iterator[Case]:
        return _attention(name, heads, news, contexts, dtype, device, options, flex=heads == sizes.heads)

    heads, window = sizes.heads, {"window": sizes.window}
    sequences, length = sizes.prompts
    prompts = (length,) * sequences
    yield from case("prefill", heads, prompts, prompts)
    yield from case("prefill, window", heads, prompts, prompts, **window)
    yield from case("prefill, chunks", heads, *sizes.pieces)
    bias = torch.randn(heads.query, 2 * 128 + 1, device=device)
    yield from case("encoder, bias", heads, prompts, prompts, causal=False, bias=bias, scale=1 / heads.size)
    for number, context in sizes.decoding:
        yield from case("decoding", heads, (1,) * number, (context,) * number)
    yield from case("decoding, ragged", heads, (1,) * len(sizes.ragged), sizes.ragged)
    number, context = sizes.decoding[-1]
    yield from case("decoding, window", heads, (1,) * number, (context,) * number, **window)
    few = prompts[: max(1, sequences // 4)]
    for other in sizes.other_heads:
        yield from case("prefill", other, few, few)
        yield from case("decoding", other, (1,) * number, (context,) * number)


def _attention(
    name: str,
    heads: Heads,
    news: tuple[int, ...],
    contexts: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    options: dict[str, Any],
    flex: bool,
) -> Iterator[Case]:
    sequences, tokens = len(news), sum(news)
    q = torch.empty(tokens, heads.query, heads.size, dtype=dtype, device=device)
    needed = [-(-context // BLOCK_SIZE) for context in contexts]
    values = scattered_zeros((sum(needed), heads.kv, BLOCK_SIZE, heads.size), dtype, device).normal_()
    keys = scattered_zeros(key_shape(values), dtype, device).normal_()
    order = torch.randperm(sum(needed)).int()
    tables = torch.nn.utils.rnn.pad_sequence(order.split(needed), batch_first=True).to(device)
    offsets = torch.tensor([0, *news]).cumsum(0).int().to(device)
    batch = (q, keys, values, tables, offsets, torch.tensor(contexts, dtype=torch.int32, device=device))
    _fill(*batch[:4], news, contexts, options.get("scale") or heads.size**-0.5)
    out, work = torch.empty_like(q), None
    if tokens == sequences:
        work = attention.make_work_list(np.array(contexts), heads.query, values, options.get("window"))
    alike = len({*zip(news, contexts, strict=True)}) == 1

    def others() -> dict[str, Make]:
        """Of what reads plain tensors: sequences alike, and no option that it lacks."""
        if options or not alike:
            return {}
        queries = torch.randn(sequences, heads.query, news[0], heads.size, dtype=dtype, device=device)
        k, v = (torch.randn(sequences, heads.kv, contexts[0], heads.size, dtype=dtype, device=device) for _ in "kv")
        paged = peers.gathered(queries, torch.randn_like(values), values, tables, contexts[0])
        return peers.attention(queries, k, v, flex) | {"gathered, SDPA": paged}

    pairs, read = 0, 0
    for new, context in zip(news, contexts, strict=True):
        pairs += seen_pairs(new, context, options.get("window"), options.get("causal", True))
        read += min(context, options.get("window", context) + new)
    shape = f"{sequences} × {news[0]} of {contexts[0]}" if alike else f"{sequences} ragged, {tokens} of {sum(contexts)}"
    triton = Case(
        name,
        f"{shape}, {heads}",
        str(dtype),
        lambda: attention.attention(*batch, out, work=work, **options),
        lambda: attention.attention_reference(q.float(), *batch[1:], **options),
        2 * q.element_size() * heads.size * (heads.query * tokens + heads.kv * read),
        4 * heads.query * heads.size * pairs,
        others,
        reads=tokens == sequences,
    )
    yield triton
    if "bias" in options or attention_flashinfer.why_not(device, dtype, heads.size):
        return
    graph = (sequences, sum(needed)) if tokens == sequences else None  # decoding goes by graphs, prompts without
    plan = FlashInfer(heads.query, values, {options.get("window")}, FlashInfer.new_workspace(device), graph=graph)
    try:
        plan.plan(*batch[3:])
    except Exception as error:  # a peer's, whatever it is: it has no kernel for these heads, for one
        print(f"left out: FlashInfer, {heads}: {type(error).__name__}")
        return
    run = functools.partial(attention.attention, *batch, torch.empty_like(q), work=plan, **options)
    yield replace(triton, name=f"{name}, FlashInfer", run=run, peers=dict)


def _fill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    news: tuple[int, ...],
    contexts: tuple[int, ...],
    scale: float,
) -> None:
    """Write sequences' queries, keys and values in which mistakes show; what lies behind a context stays as it is."""
    (_, queries, size), kv_heads = q.shape, values.shape[1]
    offset = torch.arange(BLOCK_SIZE, device=q.device)
    parts = q.split(news)
    for part, table, new, context in zip(parts, tables.long(), news, contexts, strict=True):
        telling_q, k, v = telling_attention(queries, kv_heads, size, new, context, scale, q.dtype, q.device)
        part.copy_(telling_q)
        slots = (table[:, None] * BLOCK_SIZE + offset).flatten()[:context]
        kv_write.kv_write_reference(k, v, keys, values, slots)


def seen_pairs(new: int, context: int, window: int | None, causal: bool) -> int:
    """Pairs of one of a sequence's `new` last tokens and a token that it sees."""
    if not causal:
        return new * context
    return sum(min(place + 1, window or context) for place in range(context - new, context))


def row_cases(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Norms and gates."""
    # Rows from far below the norms' epsilon, where its absence shows, to far above.
    height = torch.logspace(-3, 1, sizes.rows, device=device)[:, None]
    x, before = ((height * torch.randn(sizes.rows, sizes.hidden, device=device)).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(sizes.hidden, device=device).to(dtype) for _ in range(2))
    rms, layer = (norm.rms_norm, norm.rms_norm_reference), (norm.layer_norm, norm.layer_norm_reference)
    yield _norm("RMSNorm", rms, x, (weight,), None)
    yield _norm("LayerNorm, residual", layer, x, (weight, bias), before)
    wide = torch.randn(sizes.rows, 2 * sizes.ffn, device=device).to(dtype)
    yield _gate("SwiGLU", swiglu.swiglu, swiglu.swiglu_reference, wide)
    yield _gate("GEGLU", swiglu.geglu, swiglu.geglu_reference, wide)


def _norm(
    name: str,
    functions: tuple[Callable[..., Any], Callable[..., Any]],
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    before: torch.Tensor | None,
) -> Case:
    """`before` is the residual's content."""
    kernel, plain = functions
    residual = None if before is None else before.clone()
    added = () if residual is None else (residual,)

    def reference() -> Any:
        wide = None if before is None else before.to(torch.float32, copy=True)
        return plain(x.float(), *(w.float() for w in weights), 1e-5, *(() if wide is None else (wide,))), wide

    def prepare() -> None:
        if residual is not None and before is not None:
            residual.copy_(before)

    return Case(
        name,
        f"{x.shape[0]} × {x.shape[1]}",
        str(x.dtype),
        lambda: (kernel(x, *weights, 1e-5, *added), residual),
        reference,
        (2 if residual is None else 4) * x.numel() * x.element_size(),
        peers=lambda: peers.plain(lambda: plain(x, *weights, 1e-5, *added)),
        prepare=prepare,
    )


def _gate(name: str, kernel: Callable[..., Any], plain: Callable[..., Any], wide: torch.Tensor) -> Case:
    return Case(
        name,
        f"{wide.shape[0]} × {wide.shape[1] // 2}",
        str(wide.dtype),
        lambda: kernel(wide),
        lambda: plain(wide.float()),
        wide.numel() * wide.element_size() * 3 // 2,
        peers=lambda: peers.plain(lambda: plain(wide)),
    )


def cache_cases(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Rotation with the cache's writing, for decoding and for prompts; blocks gathered, scattered and moved."""
    for tokens in (sizes.rows, sizes.prompts[0] * sizes.prompts[1]):
        yield _rotation(sizes.heads, tokens, dtype, device)
    yield from _block_cases(sizes, dtype, device)


def _rotation(heads: Heads, tokens: int, dtype: torch.dtype, device: torch.device) -> Case:
    both = heads.query + heads.kv
    before = torch.randn(tokens, both + heads.kv, heads.size, dtype=dtype, device=device)
    qkv = before.clone()
    blocks = -(-tokens // BLOCK_SIZE)
    values = torch.zeros(blocks, heads.kv, BLOCK_SIZE, heads.size, dtype=dtype, device=device)
    keys = torch.zeros(key_shape(values), dtype=dtype, device=device)
    positions = torch.arange(tokens, device=device) % 2048
    angles = torch.outer(torch.arange(2048.0), 10000.0 ** -torch.linspace(0, 1, heads.size // 2)).to(device)
    # One sequence's tokens side by side, its blocks anywhere.
    slots = (torch.randperm(blocks)[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:tokens].to(device)
    q, k, v = qkv[:, : heads.query], qkv[:, heads.query : both], qkv[:, both:]
    arguments = (q, k, v, positions, angles.cos(), angles.sin(), keys, values, slots)

    def run() -> Any:
        rotary.rotate_and_write(*arguments)
        return q, keys, values

    def reference() -> Any:
        rotary.rotate_and_write_reference(*arguments)
        return q, keys, values

    moved = 2 * qkv.numel() * qkv.element_size() + 4 * tokens * heads.size
    return Case(
        "RoPE and cache",
        f"{tokens} tokens, {heads}",
        str(dtype),
        run,
        reference,
        moved,
        peers=lambda: peers.plain(reference),
        prepare=lambda: qkv.copy_(before),
    )


def _block_cases(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    heads, count = sizes.heads, sizes.blocks
    values = torch.empty(3 * count, heads.kv, BLOCK_SIZE, heads.size, dtype=dtype, device=device)
    before = [
        torch.randn(shape, dtype=dtype, device=device) for shape in (key_shape(values), values.shape) * sizes.layers
    ]
    cache = [tensor.clone() for tensor in before]
    order = torch.randperm(3 * count, device=device)
    sources, targets = order[:count], order[count : 2 * count]
    buffer = torch.randn(len(cache), count, cache[0][0].numel(), device=device).to(dtype)

    def prepare() -> None:
        for tensor, old in zip(cache, before, strict=True):
            tensor.copy_(old)

    def case(name: str, copy: Make, written: Any, plain: Callable[[torch.Tensor, torch.Tensor], Any]) -> Case:
        def run() -> Any:
            copy()
            return written

        def reference() -> Any:
            for tensor, part in zip(cache, buffer, strict=True):
                plain(tensor, part)
            return written

        return Case(
            name,
            f"{count} blocks of {sizes.layers} layers",
            str(dtype),
            run,
            reference,
            2 * buffer.numel() * buffer.element_size(),
            peers=lambda: {"PyTorch": reference},
            prepare=prepare,
            exact=True,
        )

    yield case(
        "blocks, gather",
        lambda: kv_blocks.gather_blocks(cache, sources, buffer),
        list(buffer),
        lambda tensor, part: torch.index_select(tensor.flatten(1), 0, sources, out=part),
    )
    yield case(
        "blocks, scatter",
        lambda: kv_blocks.scatter_blocks(buffer, cache, targets),
        cache,
        lambda tensor, part: tensor.flatten(1).index_copy_(0, targets, part),
    )


def sampling_cases(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Greedy choice, plain sampling, top-k and top-p, a repetition penalty. Tokens are to be met exactly."""
    rows, vocab = sizes.rows, sizes.vocab
    most = min(200, vocab // 2)
    choices = {
        "greedy": Choice(temperature=0.0),
        "temperature": Choice(0.8),
        "top-k 50": Choice(0.8, 50),
        f"top-k {most}, top-p 0.9": Choice(0.8, most, 0.9),
        "top-p 0.9, penalty 1.2": Choice(1.0, 0, 0.9, 1.2),
    }
    for name, choice in choices.items():
        logits, how = telling_sampling(choice, rows, vocab, dtype, device)

        def run(logits: torch.Tensor = logits, how: sampling.Sampling = how) -> torch.Tensor:
            return sampling.sample(logits, how)

        def reference(logits: torch.Tensor = logits, how: sampling.Sampling = how) -> torch.Tensor:
            return sampling.sample_reference(logits, how)

        peer = {"PyTorch, sorted": peers.sorted_sampling(logits, choice.temperature, choice.top_k, choice.top_p)}
        yield Case(
            f"sampling, {name}",
            f"{rows} × {vocab}",
            str(dtype),
            run,
            reference,
            logits.numel() * logits.element_size() + (how.seen.numel() if choice.penalty != 1 else 0),
            peers=functools.partial(dict, peer),
            exact=True,
            reads=True,
        )


def edit_cases(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """A mask, a bias and all penalties in every row."""
    rows, vocab = sizes.rows, sizes.vocab
    places, logits = torch.arange(rows, device=device), torch.randn(rows, vocab, device=device).to(dtype)

    def fill(value: float) -> torch.Tensor:
        return torch.full((rows,), value, device=device)

    edits = logit_edits.LogitEdits(
        rows=places,
        penalty=fill(1.2),
        frequency=fill(0.5),
        presence=fill(-0.7),
        slot=places.flip(0),
        mask=places.flip(0),
        allowed=torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), dtype=torch.int32, device=device),
        biased=torch.stack((places, places % vocab)),
        bias=fill(5.0),
        seen=torch.randint(0, 2, (rows, vocab), dtype=torch.uint8, device=device),
        counts=torch.randint(0, 3, (rows, vocab), dtype=torch.int32, device=device),
    )
    yield Case(
        "logit edits",
        f"{rows} × {vocab}",
        str(torch.float32),  # of the result: a token that isn't allowed is at minus infinity, which has no error
        lambda: logit_edits.edit_logits(logits, edits).clamp(min=-1e4),
        lambda: logit_edits.edit_logits_reference(logits, edits).clamp(min=-1e4),
        logits.numel() * (logits.element_size() + 4) + sum(t.nbytes for t in (edits.allowed, edits.seen, edits.counts)),
    )
