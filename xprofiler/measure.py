"""The measured source: one layer of a model on this machine, its parts timed apart (paper section 3, XProfiler).

The attention kernel is timed alone by shape, the rest of the layer by tokens, then the embedding, the head with
sampling, and what the engine adds to an iteration. The rest is timed over all of the model's layers in turn, since in
a run no layer's weights are still in the processor's caches when they are needed again. A job of several ranks
measures on all of them at once, since in a run they share power and memory bandwidth: at degree 1 and as shards of
every tensor-parallel degree that a node's ranks can form.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from exegpt.cluster import LinkSpec, local_cluster
from exegpt.kernels.kv_write import kv_write
from exegpt.model import ModelSpec
from exegpt.models import EncoderDecoder, KVCache, Model, Shard, computed_rows, load_model, random_model
from exegpt.models.device import PROCESSOR, made_current
from exegpt.models.weights import torch_dtype
from exegpt.profile import DegreeTables, LayerTables, Profile, Table
from exegpt.schedule import BLOCK_SIZE
from xprofiler import machine, store
from xprofiler.attention import COLD_BYTES, AttentionProbe
from xprofiler.collectives import host_copy, link, link_grids, measure_links, pairs, sends, time_all_reduce
from xprofiler.engine_overhead import measure_overhead
from xprofiler.links import Links, Reduce, make_links
from xprofiler.recorder import Grid, Recorder
from xprofiler.timing import Timing, timed
from xrunner.ranks import Ranks

_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 132, 196, 260, 388, 516, 772, 1028, 2052, 4100)
_PROMPTS = (1, 4, 16, 64)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_LENGTHS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_PASTS = (0, 32, 128, 512, 1024)
_ENGINE_BATCHES = (1, 4, 16, 64)
_PASSES = 3
_ATTENTION = ("encode_attention", "chunk_attention", "decode_attention")

Progress = Callable[[str, int, int], None]
"""Called with the table's name, the points measured and the points in all."""


@dataclass(frozen=True)
class Measured:
    """A job's Profile, and what its links have carried: all-reduces within a node, sends between nodes."""

    profile: Profile
    intra: LinkSpec
    inter: LinkSpec


def grids(context: int, tp: int = 1, encoder: bool = False) -> dict[str, Grid]:
    """What is measured of a model of so many positions, with an encoder or not, at a tensor-parallel degree; what isn't
    cut, at degree 1.
    """
    lengths = tuple(n for n in _LENGTHS if n < context) + ((context,) if context <= _LENGTHS[-1] else ())
    chunks = tuple(n for n in lengths if n <= 512)
    pasts = tuple(n for n in _PASTS if n < context) or (0,)
    layer = (
        Grid("rest", ("tokens",), (_TOKENS,)),
        Grid("encode_attention", ("batch", "length"), (_PROMPTS, lengths)),
        Grid("chunk_attention", ("chunk", "past"), (chunks, pasts)),
        Grid("decode_attention", ("batch", "context"), (_BATCHES, lengths)),
    )
    of_encoders = tuple(Grid(name, ("tokens",), (_TOKENS,)) for name in ("encoder_rest", "cross_projection"))
    uncut = (
        Grid("embedding", ("tokens",), (_TOKENS,)),
        Grid("head", ("rows",), (tuple(n for n in _TOKENS if n <= 512),)),
        Grid("overhead", ("batch",), (_ENGINE_BATCHES,)),
    )
    others = uncut if tp == 1 else (Grid("all_reduce", ("tokens",), (_TOKENS,)),)
    return {grid.table: grid.of_degree(tp) for grid in (*layer, *(of_encoders if encoder else ()), *others)}


def measure_profile(
    source: str | Path | ModelSpec,
    dtype: str = "fp32",
    progress: Progress | None = None,
    device: torch.device = PROCESSOR,
) -> Profile:
    """Measure a model's layers on this machine and keep the profile; an interrupted one goes on."""
    return measure_job(source, dtype, Ranks(), progress, device).profile


def measure_job(
    source: str | Path | ModelSpec,
    dtype: str,
    ranks: Ranks,
    progress: Progress | None = None,
    device: torch.device = PROCESSOR,
) -> Measured:
    """Measure a model's layers at every tensor-parallel degree within a node, on all ranks of a job at once, and the
    links between them. Rank 0 keeps the profile; an interrupted one goes on. All ranks return the same.

    `source` is a model directory, or sizes, for which weights are drawn at random: times don't depend on them.
    InputError on every rank where the ranks' models, dtypes, versions or processors differ, or where they share GPUs.
    """
    device = made_current(device)
    ranks.agree(lambda: _facts(source, dtype, device))
    spec = _spec(source)
    degrees = spec.tp_degrees(ranks.per_node)
    links = make_links(ranks, tuple(pairs(ranks).values()), device)
    facts = machine.provenance(device) | _job_facts(ranks, links)
    partial = store.path_for(spec, dtype, facts).with_suffix(".partial")
    if ranks.rank == 0:
        partial.parent.mkdir(parents=True, exist_ok=True)
    planned = [grid for tp in degrees for grid in _grids(spec, tp).values()] + list(link_grids(ranks))
    total = _PASSES * sum(map(len, planned))
    done = itertools.count(1)
    recorder = Recorder(partial, (lambda table: progress(table, next(done), total)) if progress else None, ranks)

    def load(tp: int) -> Model:
        shard = Shard(ranks.local % tp, tp, _apart)
        if isinstance(source, ModelSpec):
            return random_model(spec, _cold_layers(spec, dtype, tp), dtype, shard=shard, device=device)
        layers = None if ranks.size == 1 else _cold_layers(spec, dtype, tp)
        return load_model(source, dtype, layers, shard, device=device)

    measured = _measure(load, spec, dtype, degrees, recorder, ranks, links, facts)
    if ranks.rank == 0:
        store.save(measured.profile, spec, facts)
        recorder.forget()
    return measured


def _grids(spec: ModelSpec, tp: int = 1) -> dict[str, Grid]:
    return grids(spec.context, tp, encoder=spec.encoder_layers > 0)


def _spec(source: str | Path | ModelSpec) -> ModelSpec:
    return source if isinstance(source, ModelSpec) else ModelSpec.from_directory(source)


def _facts(source: str | Path | ModelSpec, dtype: str, device: torch.device) -> dict[str, str]:
    """What must be the same on all ranks; InputError for what can't be measured on one."""
    spec = _spec(source)
    torch_dtype(dtype)
    return {"model": spec.fingerprint, "dtype": dtype} | machine.provenance(device)


def _job_facts(ranks: Ranks, links: Links) -> dict[str, str]:
    """How a job of several ranks was measured."""
    if ranks.size == 1:
        return {}
    measured = pairs(ranks)
    return {
        "ranks": f"{len(ranks.nodes)} nodes x {ranks.per_node}",
        "measured": "all ranks at once, the median rank",
        "transport": links.how,
        "rest": "at degrees above 1 with the layer's all-reduces, measured apart",
        "ends": "embedding and head whole on every device",
        "links": " and ".join(f"{name} between ranks {a} and {b}" for name, (a, b) in measured.items())
        + (", taken for the other kind too" if len(measured) == 1 else ""),
    }


def _cold_layers(spec: ModelSpec, dtype: str, tp: int) -> int:
    """Enough layers that a layer's weights have left the processor's caches when its turn comes again: the ranks of a
    node need not hold the model as often as they are.
    """
    return min(spec.layers, -int(-COLD_BYTES // spec.layer_bytes(tp, dtype)))


@torch.inference_mode()
def _measure(
    load: Callable[[int], Model],
    spec: ModelSpec,
    dtype: str,
    degrees: tuple[int, ...],
    recorder: Recorder,
    ranks: Ranks,
    links: Links,
    facts: dict[str, str],
) -> Measured:
    """Time every point and compile the Profile."""
    for turn in range(_PASSES):
        measure_links(recorder, ranks, links, turn)
    send, send_between_nodes = sends(recorder, ranks)
    model = load(1)
    whole, overhead = _whole(model, recorder)
    tables = [whole]
    intra = local_cluster().intra if ranks.size == 1 else link(send)
    for tp in degrees[1:]:
        decoder, encoder, reduced = _shard(load(tp), recorder, links, links.all_reduce(tp))
        tables.append(replace(whole, tp=tp, decoder=decoder, encoder=encoder))
        intra = link(reduced, share=2 * (tp - 1) / tp)
    profile = Profile(
        version=Profile.VERSION,
        source="measured",
        model=spec.fingerprint,
        dtype=dtype,
        device=local_cluster().device.kind if model.device == PROCESSOR else facts["device"],
        degrees=tuple(tables),
        overhead=overhead,
        send=send,
        send_between_nodes=send_between_nodes,
        provenance=facts | host_copy(recorder, ranks),
    )
    return Measured(profile, intra, intra if ranks.size == 1 else link(send_between_nodes))


def _apart(partial: torch.Tensor) -> torch.Tensor:
    """No all-reduce: it is timed apart, by tokens."""
    return partial


def _whole(model: Model, recorder: Recorder) -> tuple[DegreeTables, Table]:
    """The tables of degree 1, and the engine's overhead."""
    points = _grids(model.spec)
    tables = _parts(model, recorder, points)
    decoder, encoder = _decoder_tables(tables), _encoder_tables(tables)
    degree = DegreeTables(1, decoder, tables["embedding"], tables["head"], encoder)
    for turn, (batch,) in itertools.product(range(_PASSES), itertools.product(*points["overhead"].points)):
        recorder.record("overhead", (batch,), turn, lambda batch=batch: measure_overhead(model, degree, batch))
    return degree, recorder.compiled(points["overhead"])


def _shard(
    model: Model, recorder: Recorder, links: Links, reduce: Reduce | None
) -> tuple[LayerTables, LayerTables | None, Table]:
    """The tables of a decoder layer's shard and of an encoder layer's, all-reduces included, one for each block of the
    layer; and the seconds of one all-reduce over its bytes.
    """
    dtype, hidden = torch_dtype(model.dtype), model.spec.hidden
    sums = functools.partial(time_all_reduce, links, reduce, hidden=hidden, dtype=dtype)
    tables = _parts(model, recorder, _grids(model.spec, model.shard.of), sums)
    reduced = tables["all_reduce"]
    sizes = tuple(computed_rows(int(tokens)) * float(hidden * dtype.itemsize) for tokens in reduced.points[0])
    for name, blocks in (("rest", 3 if model.spec.encoder_layers else 2), ("encoder_rest", 2)):
        if name in tables:
            tables[name] = _with_reduces(tables[name], reduced, blocks)
    return _decoder_tables(tables), _encoder_tables(tables), Table(("bytes",), (sizes,), reduced.values)


def _with_reduces(rest: Table, reduce: Table, blocks: int) -> Table:
    """The sum of one and `blocks` times the other; its spread is the mean of theirs, each by its share."""
    assert rest.spread and reduce.spread, "measured tables have spreads"
    values = tuple(a + blocks * b for a, b in zip(rest.values, reduce.values, strict=True))
    weighed = zip(rest.values, rest.spread, reduce.values, reduce.spread, values, strict=True)
    spread = tuple((a * s + blocks * b * t) / both for a, s, b, t, both in weighed)
    return replace(rest, values=values, spread=spread)


def _decoder_tables(tables: dict[str, Table]) -> LayerTables:
    return LayerTables(**{name: tables.get(name) for name in ("rest", *_ATTENTION, "cross_projection")})


def _encoder_tables(tables: dict[str, Table]) -> LayerTables | None:
    """Of an encoder-decoder: prompts' attention is the encoder's alone."""
    if "encoder_rest" not in tables:
        return None
    return LayerTables(rest=tables["encoder_rest"], **{name: tables[name] for name in _ATTENTION})


def _parts(
    model: Model, recorder: Recorder, points: dict[str, Grid], sums: Callable[[int], Timing | None] = lambda rows: None
) -> dict[str, Table]:
    """The tables of everything but the engine's overhead; `sums` times an all-reduce of so many rows. The attention
    probe's pool is free again at the end.
    """
    dtype = torch_dtype(model.dtype)
    probe = AttentionProbe(
        model.share, max(_PROMPTS[-1], _BATCHES[-1]), points["decode_attention"].points[1][-1], dtype, model.device
    )
    time = functools.partial(timed, device=model.device)
    # An encoder's prompts see all of themselves; decoding reads the input and the output so far in a call each.
    whole = {"causal": False, "scale": 1.0, "bias": model.encoder_bias} if isinstance(model, EncoderDecoder) else {}
    calls: dict[str, Callable[..., Timing | None]] = {
        "rest": lambda tokens: time(_layers(model, tokens)),
        "encoder_rest": lambda tokens: time(_layers(model, tokens, encoder=True)),
        "cross_projection": lambda tokens: time(_cross_projection(model, tokens)),
        "embedding": lambda tokens: time(_embedding(model, tokens)),
        "head": lambda rows: time(_head(model, rows)),
        "all_reduce": lambda tokens: sums(computed_rows(tokens)),
        "encode_attention": lambda batch, length: time(probe.call(batch, length, 0, **whole)),
        "chunk_attention": lambda chunk, past: time(probe.call(1, chunk, past, **whole)),
        "decode_attention": lambda batch, context: time(_decoding(model, probe, batch, context)),
    }
    turns = {"rest": len(model.layers), "cross_projection": len(model.layers)}
    if isinstance(model, EncoderDecoder):
        turns["encoder_rest"] = len(model.encoder)
    parts = {name: grid for name, grid in points.items() if name in calls}
    for turn, (name, grid) in itertools.product(range(_PASSES), parts.items()):
        for at in itertools.product(*grid.points):
            recorder.record(grid.table, at, turn, lambda call=calls[name], at=at: call(*at))
    return {name: recorder.compiled(grid, turns.get(name, 1)) for name, grid in parts.items()}


def _layers(model: Model, tokens: int, encoder: bool = False) -> Callable[[], object]:
    """All decoder layers, or all encoder layers, but for their attention kernels, on `tokens` tokens."""
    rows = computed_rows(tokens)
    x = _states(model, rows)
    _, positions = _ids(model, rows)
    cache, slots = _scattered(model, tokens)
    attended = torch.randn(rows, model.share.heads, model.share.head_size, dtype=x.dtype, device=model.device)
    layers: tuple[Any, ...] = model.layers
    cross = {}
    if isinstance(model, EncoderDecoder):
        layers, cross = (model.encoder, {}) if encoder else (model.layers, {"cross": lambda q: attended})

    def run() -> None:
        for layer, keys, values in zip(layers, itertools.cycle(cache.keys), itertools.cycle(cache.values)):
            layer.before_attention(x, positions, keys, values, slots)
            layer.after_attention(x, attended, **cross)

    return run


def _cross_projection(model: Model, tokens: int) -> Callable[[], object]:
    """All decoder layers' keys and values of `tokens` encoded tokens."""
    assert isinstance(model, EncoderDecoder), "a decoder-only model has none"
    encoded = _states(model, tokens)
    cache, slots = _scattered(model, tokens)

    def run() -> None:
        for layer, keys, values in zip(model.layers, cache.keys, cache.values, strict=True):
            kv_write(*layer.cross_keys_values(encoded), keys, values, slots)

    return run


def _decoding(model: Model, probe: AttentionProbe, batch: int, context: int) -> Callable[[], object]:
    """One layer's attention for one new token of each of `batch` sequences of `context` tokens; in an encoder-decoder
    half of them are the input's, which cross-attention reads.
    """
    if not isinstance(model, EncoderDecoder):
        return probe.call(batch, 1, context - 1)
    inputs, own = max(1, context // 2), context - context // 2
    cross = probe.call(batch, 1, inputs - 1, causal=False, scale=1.0)
    itself = probe.call(batch, 1, own - 1, scale=1.0, bias=model.decoder_bias)
    return lambda: (itself(), cross())


def _scattered(model: Model, tokens: int) -> tuple[KVCache, torch.Tensor]:
    """A cache that holds `tokens` tokens, and their slots in blocks at random."""
    blocks = -(-tokens // BLOCK_SIZE)
    slots = torch.randperm(blocks).unsqueeze(1) * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
    return model.new_cache(blocks, BLOCK_SIZE), slots.flatten()[:tokens].contiguous().to(model.device)


def _ids(model: Model, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and their positions."""
    ids, positions = torch.randint(model.spec.vocab, (tokens,)), torch.arange(tokens) % model.spec.context
    return ids.to(model.device), positions.to(model.device)


def _states(model: Model, rows: int) -> torch.Tensor:
    """Random states [rows, hidden]."""
    return torch.randn(rows, model.spec.hidden, dtype=torch_dtype(model.dtype), device=model.device)


def _embedding(model: Model, tokens: int) -> Callable[[], object]:
    ids, positions = _ids(model, tokens)
    return lambda: model.ends.embed(ids, positions)


def _head(model: Model, rows: int) -> Callable[[], object]:
    """Final norm, head and sampling; every layer's weights have passed through the caches in between."""
    x = _states(model, rows)
    return lambda: model.sample(x)
