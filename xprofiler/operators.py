"""The operators source: a Profile composed of single operators' measured times.

A layer is its matrix products, its attention kernel, and the norms, rotary embedding and activation between them. After
each block comes an all-reduce where devices share it. Sources measure the first two and collectives; the provenance
names what they lack.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from xcore.arrays import Array
from xcore.errors import InputError
from xcore.specs.cluster import ClusterSpec
from xcore.specs.engine_spec import NO_ENGINE, EngineSpec, find_engine
from xcore.specs.model import ModelSpec
from xcore.specs.profile import DegreeTables, LayerTables, Profile, Table
from xprofiler.expert_tables import ExpertTables

_EXPANSION = 2
"""The place of the product for keys and values among latent attention's products."""
_ACTIVATION_BYTES = 2  # activations stay in 16 bits, also between 8-bit matrix products


@dataclass(frozen=True)
class Operators:
    """The times of one device's operators."""

    rows: Array
    """[M]: the numbers of rows at which matrix products were measured, increasing."""
    product: Callable[[float, float], Array]
    """(n, k) → [M] seconds of a layer's matrix product with `n` outputs and `k` inputs."""
    head_product: Callable[[float, float], Array]
    """The same for the output head, which stays in 16 bits."""
    moved: Callable[[Array], Array]
    """Seconds of a kernel that moves this number of bytes."""
    attention: Callable[[int, int, int], tuple[Table, Table]]
    """(heads, KV heads, window) → prompts [batch, length] and decoding [batch, context], on one device.

    The window is the number of tokens that a token sees; 0: all. Latent attention has one KV head.
    """
    absorption: Callable[[int], Table]
    """Heads → [tokens] of the products with latent vectors around latent attention's decoding."""
    all_reduce: Callable[[Array, int], Array]
    """Seconds to sum arrays of this number of bytes over `tp` devices."""
    all_gather: Callable[[Array, int], Array]
    """Seconds until each of `tp` devices has all of this number of bytes."""
    exchange: Callable[[Array, int], Array]
    """Seconds until each of `devices` devices has all of this number of bytes, and then its part of their sums."""
    degrees: tuple[int, ...]
    """Tensor-parallel degrees whose collectives were measured, and 1."""
    send: Table
    """[bytes]: point to point within a node."""
    experts: ExpertTables | None = None
    """The experts of a mixture of experts; None: a dense model."""
    facts: dict[str, str] = field(default_factory=dict)
    """What else the provenance says."""


def compose(
    model: ModelSpec,
    operators: Operators,
    dtype: str,
    cluster: ClusterSpec,
    overhead_s: float,
    provenance: dict[str, str],
    serving: EngineSpec = NO_ENGINE,
) -> Profile:
    """Return the Profile of a decoder-only model whose layers are these operators, at every tensor-parallel degree.

    `serving` is the engine whose waits and own time are added. Its clock is not applied: measured operators ran at
    their own clock.

    Raises:
        InputError: The model is an encoder-decoder, or has layers that the operators lack.
    """
    _check(model, operators)
    if model.encoder_layers:
        raise InputError(
            f"'{model.name}' has an encoder with bidirectional attention, but operator tables hold only causal "
            "attention: use a decoder-only model, or the roofline."
        )
    degrees = tuple(tp for tp in model.tp_degrees(max(operators.degrees)) if tp in operators.degrees)
    sizes, inter = (1e3, 1e6, 1e9), cluster.inter
    return Profile(
        version=Profile.VERSION,
        source="operators",
        model=model.fingerprint,
        layers=model.layers_fingerprint,
        dtype=dtype,
        device=cluster.device.kind,
        degrees=tuple(_degree(model, operators, tp, serving, cluster) for tp in degrees),
        overhead=serving.overhead(overhead_s),
        send=operators.send,
        send_between_nodes=Table(
            ("bytes",), (sizes,), tuple(inter.latency_s + b / inter.bandwidth_bytes_s for b in sizes)
        ),
        in_flight=serving.in_flight,
        front_end_s=serving.front_end_s,
        provenance={
            **provenance,
            "serving": serving.name,
            "overhead_s": f"{serving.iteration_s + overhead_s:.4g}",
            **operators.facts,
            **(operators.experts.facts(degrees) if operators.experts else {}),
        },
    )


def _check(model: ModelSpec, operators: Operators) -> None:
    """Raise InputError for layers that the operators lack."""
    windows, shared = model.windows, model.attention_dp
    if windows and windows.kind == "chunks":
        raise InputError(
            f"'{model.name}' has layers that see chunks of {windows.size:,} tokens, whose attention the operator "
            "tables don't hold: leave --profile out to use the data sheet."
        )
    if shared not in operators.degrees:
        known = ", ".join(map(str, operators.degrees[1:]))
        raise InputError(
            f"The operator tables have no exchange of tokens among {shared} devices: pass --attention-dp with one of "
            f"{known}."
        )


def refuse_beyond_dense(model: ModelSpec) -> None:
    """Raise InputError for a model with parts that imported tables of kernels don't have."""
    if model.beyond_dense:
        raise InputError(
            f"Model '{model.name}' has {' and '.join(model.beyond_dense)}, which imported tables don't cover "
            "yet: leave --profile out to use the roofline."
        )


def with_engine(profile: Profile, model: ModelSpec, cluster: ClusterSpec, serving: EngineSpec) -> Profile:
    """Return imported operators' profile with the time of the engine `serving` instead of the profile's engine."""
    facts = profile.provenance
    before = find_engine(facts.get("serving", "none"))
    waited = 2 * (serving.wait_beside_measured_s - before.wait_beside_measured_s)
    sorts = model.sorts_logits and "sampling" in facts.get("not_in_source", "")

    def changed(degree: DegreeTables) -> DegreeTables:
        rows = np.array(degree.head.points[0])
        rate = cluster.device.bandwidth_bytes_s
        sorting = serving.sorting(rows, model.vocab, rate) - before.sorting(rows, model.vocab, rate)
        layer = replace(degree.decoder, rest=_later(degree.decoder.rest, waited)) if degree.tp > 1 else degree.decoder
        return replace(degree, decoder=layer, head=_later(degree.head, sorting) if sorts else degree.head)

    return replace(
        profile,
        degrees=tuple(map(changed, profile.degrees)),
        overhead=serving.overhead(),
        in_flight=serving.in_flight,
        front_end_s=serving.front_end_s,
        provenance={**facts, "serving": serving.name, "overhead_s": f"{serving.iteration_s:.4g}"},
    )


def _later(table: Table, seconds: "Array | float") -> Table:
    """Return a table whose times are longer by `seconds`."""
    return replace(table, values=tuple((np.array(table.values) + seconds).tolist()))


def _degree(model: ModelSpec, operators: Operators, tp: int, serving: EngineSpec, cluster: ClusterSpec) -> DegreeTables:
    rows, hidden = operators.rows, _ACTIVATION_BYTES * operators.rows * model.hidden
    reduce = operators.all_reduce(hidden, tp)
    waited = reduce + (serving.wait_beside_measured_s if tp > 1 else 0.0)
    products = sum(operators.product(n, k) for n, k in _projections(model, tp)) + _feed_forward(model, operators, tp)
    vocab = model.vocab // tp
    logits = operators.head_product(vocab, model.hidden) + operators.moved(4 * hidden)  # the final norm
    if model.sorts_logits:
        logits = logits + serving.sorting(rows, model.vocab, cluster.device.bandwidth_bytes_s)
    prompts, chunks, decoding = _attention(model, operators, tp)
    return DegreeTables(
        tp=tp,
        decoder=LayerTables(
            rest=_over("tokens", rows, products + _between_products(model, operators, tp) + 2 * waited),
            encode_attention=prompts,
            chunk_attention=chunks,
            decode_attention=decoding,
        ),
        embedding=_over("tokens", rows, operators.moved(2 * hidden) + reduce),
        head=_over("rows", rows, logits + operators.all_gather(_ACTIVATION_BYTES * rows * model.vocab, tp)),
    )


def _projections(model: ModelSpec, tp: int) -> tuple[tuple[int, int], ...]:
    """Return (outputs, inputs) of attention's products by tokens; latent attention expands keys with the prompts."""
    matrices = model.attention_matrices(tp)
    return matrices[:_EXPANSION] + matrices[_EXPANSION + 1 :] if model.latent else matrices


def _feed_forward(model: ModelSpec, operators: Operators, tp: int) -> Array:
    """Return [M] seconds of a layer's feed-forward products, the mean over dense layers and those with experts."""
    dense = np.asarray(sum(operators.product(n, k) for n, k in model.ffn_matrices(tp)))
    if operators.experts is None:
        return dense
    experts = operators.experts.experts
    share = experts.layers / model.layers
    block = operators.head_product(experts.count, model.hidden) + _chosen(model, operators, operators.experts, tp)
    if experts.shared_ffn:
        width = experts.shared_ffn // tp
        block = block + sum(operators.product(n, k) for n, k in model.gated_matrices(width))
        block = block + operators.moved(_ACTIVATION_BYTES * operators.rows * _activated(model, width))
    activation = operators.moved(_ACTIVATION_BYTES * operators.rows * _activated(model, model.ffn // tp))
    return np.asarray((1 - share) * (dense + activation) + share * block)


def _chosen(model: ModelSpec, operators: Operators, experts: ExpertTables, tp: int) -> Array:
    """Return [M] seconds of the experts that a router chose, and of the exchange of their tokens."""
    shared = model.attention_dp
    seconds = experts.seconds(experts.split(tp), operators.rows * shared)
    if shared > 1:
        seconds = seconds + operators.exchange(_ACTIVATION_BYTES * operators.rows * shared * model.hidden, shared)
    return seconds


def _activated(model: ModelSpec, width: int) -> int:
    """Return the values that the activation of a feed-forward network of this width reads and writes for a token."""
    up, _ = model.gated_matrices(width)
    return up[0] + width


def _attention(model: ModelSpec, operators: Operators, tp: int) -> tuple[Table, Table, Table]:
    """Return the tables of prompts, of chunks and of decoding, the mean over layers with and without a window."""
    heads, kv_heads = model.heads // tp, -(-model.kv_heads // tp)
    if model.latent:
        return _latent_attention(model, operators, tp)
    prompts, decoding = operators.attention(heads, kv_heads, 0)
    whole = prompts, _chunks(prompts, decoding), decoding
    if model.windows is None:
        return whole
    size = model.windows.size
    prompts, decoding = operators.attention(heads, kv_heads, size)
    part, share = (prompts, _chunks(prompts, decoding, size), decoding), model.windows.layers / model.layers
    encode, chunk, decode = (_mean(a, b, share) for a, b in zip(whole, part, strict=True))
    return encode, chunk, decode


def _latent_attention(model: ModelSpec, operators: Operators, tp: int) -> tuple[Table, Table, Table]:
    """Return the same of latent attention, with the expansion of keys and values or what takes its place."""
    heads = model.heads // tp
    prompts, decoding = operators.attention(heads, 1, 0)
    expanded = _over("tokens", operators.rows, operators.product(*model.attention_matrices(tp)[_EXPANSION]))
    absorbed = operators.absorption(heads)
    return (
        _with(prompts, lambda batch, length: expanded(batch * length)),
        _with(_chunks(prompts, decoding), lambda chunk, past: expanded(chunk + past)),
        _with(decoding, lambda batch, _: absorbed(batch)),
    )


def _with(of: Table, seconds: Callable[[Array, Array], "Array | float"]) -> Table:
    """Return a table over two axes with more seconds at each point."""
    at = np.meshgrid(*map(np.array, of.points), indexing="ij")
    return replace(of, values=tuple((np.array(of.values) + np.asarray(seconds(*at)).ravel()).tolist()))


def _mean(whole: Table, part: Table, share: float) -> Table:
    """Return the weighted mean of two tables on the grid of the first; `share` is the weight of the second."""
    at = np.meshgrid(*map(np.array, whole.points), indexing="ij")
    values = (1 - share) * np.array(whole.values) + share * np.asarray(part(*at)).ravel()
    return replace(whole, values=tuple(values.tolist()))


def _between_products(model: ModelSpec, operators: Operators, tp: int) -> Array:
    """Return [M] seconds of the kernels between products.

    These are norms, each with its residual sum, rotary embedding with the write to the cache, and activation. They read
    and write activations and compute next to nothing.
    """
    qkv, hidden = model.attention_matrices(tp)[0]
    norm = 4 * hidden  # input and residual in, both out
    rotary = 2 * qkv  # all in; queries out, keys and values to the cache
    moved = [norm, norm, rotary]
    if operators.experts is None:  # grouped products of experts were measured with their activation
        moved.append(_activated(model, model.ffn // tp))
    parts = [operators.moved(_ACTIVATION_BYTES * operators.rows * n) for n in moved]
    return np.asarray(np.sum(parts, axis=0))


def _over(axis: str, at: Array, seconds: Array) -> Table:
    return Table((axis,), (tuple(at.tolist()),), tuple(np.asarray(seconds, dtype=np.float64).tolist()))


def _chunks(encode: Table, decode: Table, window: float = math.inf) -> Table:
    """Return the attention of a prompt's chunk after cached tokens, derived from that of complete prompts.

    The time is the prompt's, times the chunk's share of token pairs, and at least the time to read the cache once, as
    in a decoding step.
    """
    batches, lengths = encode.points
    first = lengths[0]
    chunks = tuple(n for n in lengths if 2 * n <= lengths[-1])
    chunk, past = np.meshgrid(np.array(chunks), np.array((0.0, *chunks)), indexing="ij")
    prompt_s = encode(batches[0], np.maximum(chunk + past, first))
    share = 1 - _pairs(past, window) / _pairs(past + chunk, window)
    read = np.where(past > 0, decode(1.0, past + chunk), 0.0)
    seconds = np.maximum(prompt_s * share, read)
    return Table(("chunk", "past"), (chunks, (0.0, *chunks)), tuple(seconds.ravel().tolist()))


def _pairs(tokens: Array, window: float) -> Array:
    """Return the pairs of a prompt's tokens, each with those that it sees."""
    near = np.minimum(tokens, window)
    beyond = np.where(tokens > near, (tokens - near) * near, 0.0)
    return np.asarray(near * (near + 1) / 2 + beyond)
