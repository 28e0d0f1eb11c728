"""The measured source: one layer of a model on this machine, its parts timed apart (paper section 3, XProfiler).

The attention kernel is timed alone by shape, the rest of the layer by tokens, then the embedding, the head with
sampling, and what the engine adds to an iteration. The rest is timed over all of the model's layers in turn, since in
a run no layer's weights are still in the processor's caches when they are needed again. A job of several ranks
measures on all of them at once, since in a run they share power and memory bandwidth: at degree 1 and as shards of
every tensor-parallel degree that a node's ranks can form.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from exegpt.cluster import LinkSpec, local_cluster
from exegpt.errors import InputError
from exegpt.kernels.kv_write import kv_write
from exegpt.model import ModelSpec
from exegpt.models import Model, Shard, computed_rows, load_model, random_model
from exegpt.models.weights import torch_dtype
from exegpt.profile import DegreeTables, LayerTables, Profile, Table
from exegpt.schedule import BLOCK_SIZE
from xprofiler import machine, store
from xprofiler.attention import COLD_BYTES, AttentionProbe
from xprofiler.collectives import host_copy, link, link_grids, measure_links, pairs, sends, time_all_reduce
from xprofiler.engine_overhead import measure_overhead
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


def grids(context: int, tp: int = 1) -> dict[str, Grid]:
    """What is measured of a model of so many positions, at a tensor-parallel degree; what isn't cut, at degree 1."""
    lengths = tuple(n for n in _LENGTHS if n < context) + ((context,) if context <= _LENGTHS[-1] else ())
    chunks = tuple(n for n in lengths if n <= 512)
    pasts = tuple(n for n in _PASTS if n < context) or (0,)
    layer = (
        Grid("rest", ("tokens",), (_TOKENS,)),
        Grid("encode_attention", ("batch", "length"), (_PROMPTS, lengths)),
        Grid("chunk_attention", ("chunk", "past"), (chunks, pasts)),
        Grid("decode_attention", ("batch", "context"), (_BATCHES, lengths)),
    )
    uncut = (
        Grid("embedding", ("tokens",), (_TOKENS,)),
        Grid("head", ("rows",), (tuple(n for n in _TOKENS if n <= 512),)),
        Grid("overhead", ("batch",), (_ENGINE_BATCHES,)),
    )
    others = uncut if tp == 1 else (Grid("all_reduce", ("tokens",), (_TOKENS,)),)
    return {grid.table: grid.of_degree(tp) for grid in (*layer, *others)}


def measure_profile(directory: str | Path, dtype: str = "fp32", progress: Progress | None = None) -> Profile:
    """Measure a model directory's layers on this machine and keep the profile; an interrupted one goes on."""
    return measure_job(directory, dtype, Ranks(), progress).profile


def measure_job(source: str | Path | ModelSpec, dtype: str, ranks: Ranks, progress: Progress | None = None) -> Measured:
    """Measure a model's layers at every tensor-parallel degree within a node, on all ranks of a job at once, and the
    links between them. Rank 0 keeps the profile; an interrupted one goes on. All ranks return the same.

    `source` is a model directory, or sizes, for which weights are drawn at random: times don't depend on them.
    InputError on every rank where the ranks' models, dtypes, versions or processors differ.
    """
    ranks.agree(lambda: _facts(source, dtype))
    spec = _spec(source)
    degrees = spec.tp_degrees(ranks.per_node)
    facts = machine.provenance() | _job_facts(ranks)
    partial = store.path_for(spec, dtype, facts).with_suffix(".partial")
    if ranks.rank == 0:
        partial.parent.mkdir(parents=True, exist_ok=True)
    planned = [grid for tp in degrees for grid in grids(spec.context, tp).values()] + list(link_grids(ranks))
    total = _PASSES * sum(map(len, planned))
    done = itertools.count(1)
    recorder = Recorder(partial, (lambda table: progress(table, next(done), total)) if progress else None, ranks)

    def load(tp: int) -> Model:
        shard = Shard(ranks.local % tp, tp, _apart)
        if isinstance(source, ModelSpec):
            return random_model(spec, _cold_layers(spec, dtype, tp), dtype, shard=shard)
        return load_model(source, dtype, None if ranks.size == 1 else _cold_layers(spec, dtype, tp), shard)

    measured = _measure(load, spec, dtype, degrees, recorder, ranks, facts)
    if ranks.rank == 0:
        store.save(measured.profile, spec, facts)
        recorder.forget()
    return measured


def _spec(source: str | Path | ModelSpec) -> ModelSpec:
    return source if isinstance(source, ModelSpec) else ModelSpec.from_directory(source)


def _facts(source: str | Path | ModelSpec, dtype: str) -> dict[str, str]:
    """What must be the same on all ranks; InputError for what can't be measured on one."""
    spec = _spec(source)
    if spec.encoder_layers:
        raise InputError(
            f"Model '{spec.name}' has an encoder, whose layers can't be measured yet: tune with --profile roofline."
        )
    torch_dtype(dtype)
    return {"model": spec.fingerprint, "dtype": dtype} | machine.provenance()


def _job_facts(ranks: Ranks) -> dict[str, str]:
    """How a job of several ranks was measured."""
    if ranks.size == 1:
        return {}
    measured = pairs(ranks)
    return {
        "ranks": f"{len(ranks.nodes)} nodes x {ranks.per_node}",
        "measured": "all ranks at once, the median rank",
        "transport": "MPI through host memory",
        "rest": "at degrees above 1 with two all-reduces per layer, measured apart",
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
    facts: dict[str, str],
) -> Measured:
    """Time every point and compile the Profile."""
    for turn in range(_PASSES):
        measure_links(recorder, ranks, turn)
    send, send_between_nodes = sends(recorder, ranks)
    whole, overhead = _whole(load(1), recorder)
    tables = [whole]
    intra = local_cluster().intra if ranks.size == 1 else link(send)
    for tp in degrees[1:]:
        shard, reduced = _shard(load(tp), recorder, ranks.group(tp))
        tables.append(DegreeTables(tp=tp, decoder=shard, embedding=whole.embedding, head=whole.head))
        intra = link(reduced, share=2 * (tp - 1) / tp)
    profile = Profile(
        version=Profile.VERSION,
        source="measured",
        model=spec.fingerprint,
        dtype=dtype,
        device=local_cluster().device.kind,
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
    points = grids(model.spec.context)
    tables = _parts(model, recorder, points)
    degree = DegreeTables(tp=1, decoder=_layer_tables(tables), embedding=tables["embedding"], head=tables["head"])
    for turn, (batch,) in itertools.product(range(_PASSES), itertools.product(*points["overhead"].points)):
        recorder.record("overhead", (batch,), turn, lambda batch=batch: measure_overhead(model, degree, batch))
    return degree, recorder.compiled(points["overhead"])


def _shard(model: Model, recorder: Recorder, group: object) -> tuple[LayerTables, Table]:
    """The tables of a layer's shard, its two all-reduces included, and the seconds of one all-reduce over its bytes."""
    tables = _parts(model, recorder, grids(model.spec.context, model.shard.of), group)
    rest, reduce = tables["rest"], tables["all_reduce"]
    values = tuple(a + 2 * b for a, b in zip(rest.values, reduce.values, strict=True))
    assert rest.spread and reduce.spread, "measured tables have spreads"
    weighed = zip(rest.values, rest.spread, reduce.values, reduce.spread, values, strict=True)
    spread = tuple((a * s + 2 * b * t) / both for a, s, b, t, both in weighed)
    row_bytes = model.spec.hidden * torch_dtype(model.dtype).itemsize
    sizes = tuple(computed_rows(int(tokens)) * float(row_bytes) for tokens in reduce.points[0])
    layer = replace(_layer_tables(tables), rest=replace(rest, values=values, spread=spread))
    return layer, Table(("bytes",), (sizes,), reduce.values)


def _layer_tables(tables: dict[str, Table]) -> LayerTables:
    return LayerTables(**{name: tables[name] for name in ("rest", *_ATTENTION)})


def _parts(model: Model, recorder: Recorder, points: dict[str, Grid], group: object = None) -> dict[str, Table]:
    """The tables of everything but the engine's overhead. The attention probe's pool is free again at the end."""
    dtype = torch_dtype(model.dtype)
    probe = AttentionProbe(
        model.share, max(_PROMPTS[-1], _BATCHES[-1]), points["decode_attention"].points[1][-1], dtype
    )
    calls: dict[str, Callable[..., Timing | None]] = {
        "rest": lambda tokens: timed(_layers(model, tokens)),
        "embedding": lambda tokens: timed(_embedding(model, tokens)),
        "head": lambda rows: timed(_head(model, rows)),
        "all_reduce": lambda tokens: time_all_reduce(group, computed_rows(tokens), model.spec.hidden, dtype),
        "encode_attention": lambda batch, length: timed(probe.call(batch, length, 0)),
        "chunk_attention": lambda chunk, past: timed(probe.call(1, chunk, past)),
        "decode_attention": lambda batch, context: timed(probe.call(batch, 1, context - 1)),
    }
    parts = {name: grid for name, grid in points.items() if name in calls}
    for turn, (name, grid) in itertools.product(range(_PASSES), parts.items()):
        for at in itertools.product(*grid.points):
            recorder.record(grid.table, at, turn, lambda call=calls[name], at=at: call(*at))
    return {name: recorder.compiled(grid, len(model.layers) if name == "rest" else 1) for name, grid in parts.items()}


def _layers(model: Model, tokens: int) -> Callable[[], object]:
    """All layers but for their attention kernel, on `tokens` tokens."""
    rows = computed_rows(tokens)
    x = torch.randn(rows, model.spec.hidden, dtype=torch_dtype(model.dtype))
    _, positions = _ids(model, rows)
    blocks = -(-tokens // BLOCK_SIZE)
    cache = model.new_cache(blocks, BLOCK_SIZE)
    slots = (
        (torch.randperm(blocks).unsqueeze(1) * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:tokens].contiguous()
    )
    attended = torch.randn(rows, model.share.heads, model.share.head_size, dtype=x.dtype)

    def run() -> None:
        for layer, keys, values in zip(model.layers, cache.keys, cache.values, strict=True):
            _, k, v = layer.before_attention(x, positions)
            kv_write(k[:tokens], v[:tokens], keys, values, slots)
            layer.after_attention(x, attended)

    return run


def _ids(model: Model, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and their positions."""
    return torch.randint(model.spec.vocab, (tokens,)), torch.arange(tokens) % model.spec.context


def _embedding(model: Model, tokens: int) -> Callable[[], object]:
    ids, positions = _ids(model, tokens)
    return lambda: model.ends.embed(ids, positions)


def _head(model: Model, rows: int) -> Callable[[], object]:
    """Final norm, head and sampling; every layer's weights have passed through the caches in between."""
    x = torch.randn(rows, model.spec.hidden, dtype=torch_dtype(model.dtype))
    return lambda: model.sample(x)
