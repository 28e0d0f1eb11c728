"""The measured source: one layer of a model on this machine, its parts timed apart (paper section 3, XProfiler).

The attention kernel is timed alone by shape, the rest of the layer by tokens, then the embedding, the head with
sampling, and what the engine adds to an iteration. The rest is timed over all of the model's layers in turn, since in
a run no layer's weights are still in the processor's caches when they are needed again.
"""

import itertools
from collections.abc import Callable
from pathlib import Path

import torch

from exegpt.cluster import local_cluster
from exegpt.kernels.kv_write import kv_write
from exegpt.models import Model, computed_rows, load_model
from exegpt.models.weights import torch_dtype
from exegpt.profile import DegreeTables, LayerTables, Profile, Table
from exegpt.schedule import BLOCK_SIZE
from xprofiler import machine, store
from xprofiler.attention import AttentionProbe
from xprofiler.engine_overhead import measure_overhead
from xprofiler.recorder import Grid, Recorder
from xprofiler.timing import timed

_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 132, 196, 260, 388, 516, 772, 1028, 2052, 4100)
_PROMPTS = (1, 4, 16, 64)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_LENGTHS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_PASTS = (0, 32, 128, 512, 1024)
_ENGINE_BATCHES = (1, 4, 16, 64)
_PASSES = 3

Progress = Callable[[str, int, int], None]
"""Called with the table's name, the points measured and the points in all."""


def grids(context: int) -> dict[str, Grid]:
    """What is measured, for a model of so many positions."""
    lengths = tuple(n for n in _LENGTHS if n < context) + ((context,) if context <= _LENGTHS[-1] else ())
    chunks = tuple(n for n in lengths if n <= 512)
    pasts = tuple(n for n in _PASTS if n < context) or (0,)
    made = (
        Grid("rest", ("tokens",), (_TOKENS,)),
        Grid("embedding", ("tokens",), (_TOKENS,)),
        Grid("head", ("rows",), (tuple(n for n in _TOKENS if n <= 512),)),
        Grid("encode_attention", ("batch", "length"), (_PROMPTS, lengths)),
        Grid("chunk_attention", ("chunk", "past"), (chunks, pasts)),
        Grid("decode_attention", ("batch", "context"), (_BATCHES, lengths)),
        Grid("overhead", ("batch",), (_ENGINE_BATCHES,)),
    )
    return {grid.table: grid for grid in made}


@torch.inference_mode()
def measure(model: Model, recorder: Recorder) -> Profile:
    """Time every point of the model's grids and compile the Profile of one device."""
    points = grids(model.spec.context)
    tables = _parts(model, recorder, points)
    layer = LayerTables(
        rest=tables["rest"],
        encode_attention=tables["encode_attention"],
        chunk_attention=tables["chunk_attention"],
        decode_attention=tables["decode_attention"],
    )
    degree = DegreeTables(tp=1, decoder=layer, embedding=tables["embedding"], head=tables["head"])
    for turn, (batch,) in itertools.product(range(_PASSES), itertools.product(*points["overhead"].points)):
        recorder.record("overhead", (batch,), turn, lambda batch=batch: measure_overhead(model, degree, batch))
    local = Table(("bytes",), ((1.0,),), (0.0,))  # one device sends nothing
    return Profile(
        version=Profile.VERSION,
        source="measured",
        model=model.spec.fingerprint,
        dtype=model.dtype,
        device=local_cluster().device.kind,
        degrees=(degree,),
        overhead=recorder.compiled(points["overhead"]),
        send=local,
        send_between_nodes=local,
        provenance=machine.provenance(),
    )


def _parts(model: Model, recorder: Recorder, points: dict[str, Grid]) -> dict[str, Table]:
    """The tables of everything but the engine's overhead. The attention probe's pool is free again at the end."""
    probe = AttentionProbe(
        model.spec, max(_PROMPTS[-1], _BATCHES[-1]), points["decode_attention"].points[1][-1], torch_dtype(model.dtype)
    )
    calls: dict[str, Callable[..., Callable[[], object]]] = {
        "rest": lambda tokens: _layers(model, tokens),
        "embedding": lambda tokens: _embedding(model, tokens),
        "head": lambda rows: _head(model, rows),
        "encode_attention": lambda batch, length: probe.call(batch, length, 0),
        "chunk_attention": lambda chunk, past: probe.call(1, chunk, past),
        "decode_attention": lambda batch, context: probe.call(batch, 1, context - 1),
    }
    for turn, (name, call) in itertools.product(range(_PASSES), calls.items()):
        for at in itertools.product(*points[name].points):
            recorder.record(name, at, turn, lambda call=call, at=at: timed(call(*at)))
    return {name: recorder.compiled(points[name], len(model.layers) if name == "rest" else 1) for name in calls}


def measure_profile(directory: str | Path, dtype: str = "fp32", progress: Progress | None = None) -> Profile:
    """Measure a model directory's layers on this machine and keep the profile; an interrupted one goes on."""
    model = load_model(directory, dtype)
    facts = machine.provenance()
    partial = store.path_for(model.spec, dtype, facts).with_suffix(".partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    total = _PASSES * sum(len(grid) for grid in grids(model.spec.context).values())
    done = itertools.count(1)
    recorder = Recorder(partial, (lambda table: progress(table, next(done), total)) if progress else None)
    profile = measure(model, recorder)
    store.save(profile, model.spec, facts)
    recorder.forget()
    return profile


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
    attended = torch.randn(rows, model.spec.heads, model.spec.head_size, dtype=x.dtype)

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
