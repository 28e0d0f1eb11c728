"""The measured source: one layer of a model on this machine, its parts timed separately (paper section 3, XProfiler).

The timed parts are the attention kernel by shape, the rest of the layer by tokens, the embedding, and the head with
sampling. The engine's overhead per iteration is timed too. The rest of the layer is timed over all of the model's
layers in turn: in a run no layer's weights stay in the CPU's caches between iterations. A job of several ranks measures
on all of them at once, since in a run they share power and memory bandwidth. It measures degree 1 and the shards of
every tensor-parallel degree that a node's ranks can form.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from xcore.specs.cluster import local_cluster
from xcore.specs.device_spec import LinkSpec
from xcore.specs.model import ModelSpec
from xcore.specs.profile import DegreeTables, LayerTables, Profile, Table
from xprofiler import machine, store
from xprofiler.attention_probe import COLD_BYTES, AttentionOptions, AttentionProbe
from xprofiler.collectives import host_copy, link, link_grids, measure_links, pairs, sends, time_all_reduce
from xprofiler.engine_overhead import measure_overhead
from xprofiler.iteration import Iteration, Part
from xprofiler.links import Links, Reduce, make_links
from xprofiler.merged_cache import merged_ratio
from xprofiler.model_switch import switch_seconds
from xprofiler.passes import cross_projection_pass, decoding_attention, embedding_pass, head_pass, in_a_row, layer_calls
from xprofiler.points import FULL, MERGED, TIMES_LARGER, Points, grids
from xprofiler.recorder import Recorder
from xprofiler.timing import Timing, timed
from xrunner.comm.ranks import Ranks
from xrunner.models import EncoderDecoder, Model, Shard, computed_rows, load_model, random_model
from xrunner.models.attention_planning import check_attention
from xrunner.models.cache import checked_kv_dtype
from xrunner.models.device import CPU, made_current
from xrunner.models.weights import torch_dtype
from xrunner.rank.iteration_graphs import SIZES

_GPU_COLD_BYTES = 2**31
"""Weights that are read in a row on a GPU: at most 3 % of them can still be in the 60 MB of an H200's second cache."""
_ATTENTION = ("encode_attention", "chunk_attention", "decode_attention")
_SWITCHED_TOKENS = 4
"""Tokens of the iterations that are timed after other models': they mostly read weights."""

Progress = Callable[[str, int, int], None]
"""Called with the table's name, the number of measured points and the number of all points."""


@dataclass(frozen=True)
class MeasuredCluster:
    """A job's Profile and its measured links: all-reduces within a node, sends between nodes."""

    profile: Profile
    intra: LinkSpec
    inter: LinkSpec


def measure_profile(
    source: str | Path | ModelSpec,
    dtype: str = "fp32",
    progress: Progress | None = None,
    device: torch.device = CPU,
    points: Points = FULL,
    *,
    attention: str = "triton",
    kv_dtype: str | None = None,
) -> Profile:
    """Measure a model's layers on this machine and store the profile; resumes an interrupted measurement."""
    return measure_job(source, dtype, Ranks(), progress, device, points, attention=attention, kv_dtype=kv_dtype).profile


def measure_job(
    source: str | Path | ModelSpec,
    dtype: str,
    ranks: Ranks,
    progress: Progress | None = None,
    device: torch.device = CPU,
    points: Points = FULL,
    *,
    attention: str = "triton",
    kept: bool = True,
    kv_dtype: str | None = None,
) -> MeasuredCluster:
    """Measure a model's layers at every tensor-parallel degree within a node, and the links between the ranks.

    All ranks of a job measure at once, and all return the same. A single rank stores the profile if it is to be `kept`
    (several: `xprofiler/job.py`). An interrupted measurement is resumed.

    `source` is a model directory, or sizes, for which weights are drawn at random: times don't depend on them.
    `attention` and `kv_dtype` as in `load_model`.

    Raises:
        InputError: On every rank, if the ranks' models, dtypes, versions or CPUs differ, or if they share GPUs.
    """
    device = made_current(device)
    ranks.agree(lambda: _facts(source, dtype, device, attention, kv_dtype))
    spec = _spec(source)
    degrees = spec.tp_degrees(ranks.per_node)
    links = make_links(ranks, tuple(pairs(ranks).values()), device)
    reduces = {tp: links.all_reduce(tp) for tp in degrees[1:]}
    facts = store.facts(device, points, attention=attention, kv_dtype=kv_dtype) | _job_facts(ranks, links)
    partial = store.path_for(spec, dtype, facts).with_suffix(".partial")
    if ranks.rank == 0:
        partial.parent.mkdir(parents=True, exist_ok=True)
    if points == FULL and device.type != "cpu" and attention == "triton" and not spec.encoder_layers:
        points = points.padded_to(SIZES)
    planned = [grid for tp in degrees for grid in grids(points, spec, tp).values()] + list(link_grids(ranks))
    planned = [grid for grid in planned if grid.table not in ("switch", MERGED.table) or device == CPU]
    total = points.passes * sum(map(len, planned))
    done = itertools.count(1)
    recorder = Recorder(partial, (lambda table: progress(table, next(done), total)) if progress else None, ranks)

    def load(tp: int) -> Model:
        shard = Shard(ranks.local % tp, tp, _no_all_reduce)
        layers = cold_layers(spec, dtype, tp, device)
        if isinstance(source, ModelSpec):
            return random_model(spec, layers, dtype, shard=shard, device=device, attention=attention, kv_dtype=kv_dtype)
        held = None if ranks.size == 1 else layers
        return load_model(source, dtype, held, shard, device=device, attention=attention, kv_dtype=kv_dtype)

    measured = _measure(load, spec, dtype, reduces, recorder, ranks, links, facts, points)
    if ranks.size == 1 and kept:
        store.save(measured.profile, spec, facts)
    if ranks.rank == 0:
        recorder.forget()
    return measured


def _spec(source: str | Path | ModelSpec) -> ModelSpec:
    return source if isinstance(source, ModelSpec) else ModelSpec.from_directory(source)


def _facts(
    source: str | Path | ModelSpec, dtype: str, device: torch.device, attention: str, kv_dtype: str | None
) -> dict[str, str]:
    """Return the facts that must be the same on all ranks.

    Raises:
        InputError: The model or dtype can't be measured.
    """
    spec = _spec(source)
    torch_dtype(dtype)
    check_attention(attention, spec, dtype, device)
    kept = checked_kv_dtype(kv_dtype, spec, dtype, device)
    return {"model": spec.fingerprint, "dtype": dtype, "kv_dtype": kept} | machine.provenance(device, attention)


def _job_facts(ranks: Ranks, links: Links) -> dict[str, str]:
    """Return the provenance of a job of several ranks; empty for one rank."""
    if ranks.size == 1:
        return {}
    measured = pairs(ranks)
    return {
        "ranks": f"{len(ranks.nodes)} nodes x {ranks.per_node}",
        "measured": "all ranks at once, the median rank",
        "transport": links.how,
        "rest": "at degrees above 1 with the layer's all-reduces, measured separately",
        "ends": "embedding and head whole on every device",
        "links": " and ".join(f"{name} between ranks {a} and {b}" for name, (a, b) in measured.items())
        + (", used for the other kind too" if len(measured) == 1 else ""),
    }


def cold_layers(spec: ModelSpec, dtype: str, tp: int, device: torch.device) -> int:
    """Return the number of layers after which a layer's weights have left the device's caches.

    With that many layers, the ranks of a node need not each hold a copy of the model.
    """
    cold = COLD_BYTES if device.type == "cpu" else _GPU_COLD_BYTES
    return min(spec.layers, -int(-cold // spec.layer_bytes(tp, dtype)))


@torch.inference_mode()
def _measure(
    load: Callable[[int], Model],
    spec: ModelSpec,
    dtype: str,
    reduces: dict[int, Reduce | None],
    recorder: Recorder,
    ranks: Ranks,
    links: Links,
    facts: dict[str, str],
    points: Points,
) -> MeasuredCluster:
    """Time every point and compile the Profile.

    `reduces`: the all-reduce of each tensor-parallel degree above 1.
    """
    for turn in range(points.passes):
        measure_links(recorder, ranks, links, turn)
    send, send_between_nodes = sends(recorder, ranks)
    model = load(1)
    unsharded, overhead = _whole(model, recorder, points)
    switch = _switch(model, recorder, points) if model.device == CPU else None
    merged_blocks = _merged_blocks(model, recorder, points) if model.device == CPU else None
    tables = [unsharded]
    intra = local_cluster().intra if ranks.size == 1 else link(send)
    for tp, reduce in reduces.items():
        decoder, encoder, reduced = _shard(load(tp), recorder, points, links, reduce)
        tables.append(replace(unsharded, tp=tp, decoder=decoder, encoder=encoder))
        intra = link(reduced, share=2 * (tp - 1) / tp)
    profile = Profile(
        version=Profile.VERSION,
        source="measured",
        model=spec.fingerprint,
        layers=spec.layers_fingerprint,
        dtype=dtype,
        device=local_cluster().device.kind if model.device == CPU else facts["device"],
        degrees=tuple(tables),
        overhead=overhead,
        send=send,
        send_between_nodes=send_between_nodes,
        provenance=facts | host_copy(recorder, ranks),
        switch=switch,
        merged_blocks=merged_blocks,
    )
    return MeasuredCluster(profile, intra, intra if ranks.size == 1 else link(send_between_nodes))


def _no_all_reduce(partial: torch.Tensor) -> torch.Tensor:
    """Return the partial sums unreduced: the all-reduce is timed separately, by tokens."""
    return partial


def _whole(model: Model, recorder: Recorder, points: Points) -> tuple[DegreeTables, Table]:
    """Return the tables of degree 1, and the engine's overhead."""
    tables = _parts(model, recorder, points)
    decoder, encoder = _decoder_tables(tables, points), _encoder_tables(tables)
    degree = DegreeTables(1, decoder, tables["embedding"], tables["head"], encoder)
    grid = grids(points, model.spec)["overhead"]
    for turn, batch in itertools.product(range(points.passes), grid.points[0]):
        recorder.record("overhead", (batch,), turn, functools.partial(measure_overhead, model, degree, batch))
    return degree, recorder.compiled(grid)


def _switch(model: Model, recorder: Recorder, points: Points) -> Table:
    """Return the extra time of one of the model's iterations after other models' iterations; 0 after none."""
    iteration = in_a_row([*layer_calls(model, _SWITCHED_TOKENS), head_pass(model, _SWITCHED_TOKENS)])
    grid = grids(points, model.spec)["switch"]

    def switched(size: int) -> Timing:
        return switch_seconds(iteration, torch.ones(size // 4).sum)

    for turn, size in itertools.product(range(points.passes), grid.points[0]):
        recorder.record("switch", (size,), turn, functools.partial(switched, size))
    measured = recorder.compiled(grid, len(model.layers) / model.spec.layers)
    assert measured.spread, "measured tables have spreads"
    zero, values, spread = (0.0, *measured.points[0]), (0.0, *measured.values), (0.0, *measured.spread)
    return replace(measured, points=(zero,), values=values, spread=spread)


def _merged_blocks(model: Model, recorder: Recorder, points: Points) -> float | None:
    """Return the factor by which an iteration takes longer over merged blocks; None in an encoder-decoder."""
    if isinstance(model, EncoderDecoder):
        return None
    for turn in range(points.passes):
        recorder.record(MERGED.table, (TIMES_LARGER,), turn, functools.partial(merged_ratio, model))
    return max(1.0, recorder.compiled(MERGED).values[0])


def _shard(
    model: Model, recorder: Recorder, points: Points, links: Links, reduce: Reduce | None
) -> tuple[LayerTables, LayerTables | None, Table]:
    """Return the tables of the shards of a decoder and an encoder layer, and of an all-reduce by its bytes.

    The layers' tables include one all-reduce for each block of the layer.
    """
    dtype, hidden = torch_dtype(model.dtype), model.spec.hidden
    sums = functools.partial(time_all_reduce, links, reduce, hidden=hidden, dtype=dtype)
    tables = _parts(model, recorder, points, sums)
    reduced = tables["all_reduce"]
    sizes = tuple(computed_rows(int(tokens)) * float(hidden * dtype.itemsize) for tokens in reduced.points[0])
    for name, blocks in (("rest", 3 if model.spec.encoder_layers else 2), ("encoder_rest", 2)):
        if name in tables:
            tables[name] = _with_reduces(tables[name], reduced, blocks)
    return _decoder_tables(tables, points), _encoder_tables(tables), Table(("bytes",), (sizes,), reduced.values)


def _with_reduces(rest: Table, reduce: Table, blocks: int) -> Table:
    """Return the sum of `rest` and `blocks` times `reduce`; the spread is the mean of both, weighted by their time."""
    assert rest.spread and reduce.spread, "measured tables have spreads"
    values = tuple(a + blocks * b for a, b in zip(rest.values, reduce.values, strict=True))
    weighed = zip(rest.values, rest.spread, reduce.values, reduce.spread, values, strict=True)
    spread = tuple((a * s + blocks * b * t) / both for a, s, b, t, both in weighed)
    return replace(rest, values=values, spread=spread)


def _decoder_tables(tables: dict[str, Table], points: Points) -> LayerTables:
    attention = {name: tables[name] for name in _ATTENTION}
    rest = padded(tables["rest"], points.padded)
    return LayerTables(rest, **attention, cross_projection=tables.get("cross_projection"))


def padded(table: Table, most: int) -> Table:
    """Return a table by tokens in which each number up to `most` takes as long as the next measured one."""
    assert table.spread, "measured tables have spreads"
    tokens: list[float] = []
    values: list[float] = []
    spread: list[float] = []
    last = 0.0
    for now, seconds, varied in zip(*table.points, table.values, table.spread, strict=True):
        stair = [last + 1, now] if now <= most and now > last + 1 else [now]
        tokens, values, spread = [*tokens, *stair], values + [seconds] * len(stair), spread + [varied] * len(stair)
        last = now
    return replace(table, points=(tuple(tokens),), values=tuple(values), spread=tuple(spread))


def _encoder_tables(tables: dict[str, Table]) -> LayerTables | None:
    """Return the encoder layer's tables; None for a decoder-only model."""
    if "encoder_rest" not in tables:
        return None
    return LayerTables(rest=tables["encoder_rest"], **{name: tables[name] for name in _ATTENTION})


def _parts(
    model: Model, recorder: Recorder, points: Points, sums: Callable[[int], Timing | None] = lambda rows: None
) -> dict[str, Table]:
    """Return all tables except the engine's overhead; `sums(rows)` times an all-reduce of `rows` rows.

    The attention probe's pool is freed at the end.
    """
    planned = grids(points, model.spec, model.shard.of)
    most = max(points.prompts[-1], points.batches[-1])
    longest = planned["decode_attention"].points[1][-1]
    probe = AttentionProbe(model.share, most, longest, model.dtype, model.device, model.attention, model.kv_dtype)
    iteration = Iteration(model, probe)
    # An encoder's prompts see all of themselves; decoding reads the input and the output so far in a call each.
    options: AttentionOptions = {}
    if isinstance(model, EncoderDecoder):
        options = {"causal": False, "scale": 1.0, "bias": model.encoder_bias}

    def time(part: Part) -> Timing:
        return timed(part.call, before=part.before, untimed=part.untimed, device=model.device)

    def attention(batch: int, new: int, past: int) -> Timing:
        return time(iteration.attention(probe.call(batch, new, past, **options), batch * new))

    calls: dict[str, Callable[[int], Timing | None] | Callable[[int, int], Timing | None]] = {
        "rest": lambda tokens: time(iteration.layers(tokens)),
        "encoder_rest": lambda tokens: time(iteration.layers(tokens, encoder=True)),
        "cross_projection": lambda tokens: time(iteration.end(cross_projection_pass(model, tokens), tokens)),
        "embedding": lambda tokens: time(iteration.end(embedding_pass(model, tokens), tokens)),
        "head": lambda rows: time(iteration.head(rows)),
        "all_reduce": lambda tokens: sums(computed_rows(tokens)),
        "encode_attention": lambda batch, length: attention(batch, length, 0),
        "chunk_attention": lambda chunk, past: attention(1, chunk, past),
        "decode_attention": lambda batch, context: time(
            iteration.attention(decoding_attention(model, probe, batch, context), batch)
        ),
    }
    turns = {"rest": len(model.layers), "cross_projection": len(model.layers)}
    if isinstance(model, EncoderDecoder):
        turns["encoder_rest"] = len(model.encoder)
    parts = {name: grid for name, grid in planned.items() if name in calls}
    for turn, (name, grid) in itertools.product(range(points.passes), parts.items()):
        for at in itertools.product(*grid.points):
            recorder.record(grid.table, at, turn, functools.partial(calls[name], *at))
    return {name: recorder.compiled(grid, turns.get(name, 1)) for name, grid in parts.items()}
