"""Measured attention kernels: prompts and decoding, by numbers of heads, over one common grid for each phase.

Latent attention was measured with the sizes of DeepSeek-V3, which Kimi-K2 has too.
"""

from collections import Counter, defaultdict

import numpy as np

from xcore.errors import InputError
from xcore.specs.latent_attention import LatentAttention
from xcore.specs.profile import Table
from xprofiler.gaps import bridge, gridded, table
from xprofiler.operator_tables import MS, OperatorTables

_LATENT = LatentAttention(kv_rank=512, nope=128, rope=64, value=128)
_KV_DTYPES = {"bf16": "bfloat16", "fp16": "bfloat16", "fp8": "fp8"}


def attention_tables(
    tables: OperatorTables, phase: str, head_size: int, kv_dtype: str, window: int = 0
) -> dict[tuple[int, int], Table]:
    """Return tables over one common grid by (heads, KV heads), of the kernel with which most rows were measured.

    `phase` is `context` or `generation`, and `window` the tokens that a token sees; 0: all. If a table has 8-bit
    attention as well as 8-bit keys and values, the 8-bit attention is what the engine uses.
    """
    name, kv = f"{phase}_attention", _KV_DTYPES.get(kv_dtype, kv_dtype)
    only = {"head_dim": head_size, "window_size": window, "kv_cache_dtype": kv}
    rows = tables.columns("attention", name, only)
    kept = np.ones(len(rows["latency"]), dtype=bool)
    if kv_dtype == "fp8" and "fp8" in rows["attn_dtype"]:
        kept &= rows["attn_dtype"] == "fp8"
    kept &= rows["kernel_source"] == Counter(rows["kernel_source"][kept]).most_common(1)[0][0]
    length = rows["isl"] + rows["step"]  # a decoding row's step is what is cached before its token
    cells: dict[tuple[int, int], dict[tuple[float, ...], float]] = defaultdict(dict)
    key = (rows["num_heads"], rows["num_key_value_heads"], rows["batch_size"], length, rows["latency"])
    for heads, kv_heads, batch, tokens, latency in zip(*(column[kept].tolist() for column in key), strict=True):
        cells[heads, kv_heads][float(batch), float(tokens)] = latency * MS
    points = tuple(tuple(map(float, np.unique(column[kept]))) for column in (rows["batch_size"], length))
    power = 2.0 if phase == "context" and not window else 1.0
    axes = ("batch", "length" if phase == "context" else "context")
    return {heads: completed(axes, points, measured, power) for heads, measured in cells.items()}


def latent_tables(tables: OperatorTables, latent: LatentAttention, heads: int, kv_dtype: str) -> tuple[Table, Table]:
    """Return latent attention of `heads` heads: prompts over expanded keys, and decoding over latent vectors.

    Raises:
        InputError: Attention of these sizes was not measured.
    """
    measured = (latent.kv_rank, latent.nope, latent.rope, latent.value)
    if latent.index or measured != (_LATENT.kv_rank, _LATENT.nope, _LATENT.rope, _LATENT.value):
        kind = "over an index" if latent.index else f"with sizes {', '.join(map(str, measured))}"
        raise InputError(
            f"The tables have no latent attention {kind}, only that of DeepSeek-V3: leave --profile out to use the "
            "data sheet."
        )
    prompts, decoding = (
        _latent_phase(tables, phase, heads, _KV_DTYPES.get(kv_dtype, kv_dtype)) for phase in ("context", "generation")
    )
    return prompts, decoding


def _latent_phase(tables: OperatorTables, phase: str, heads: int, kv: str) -> Table:
    rows = tables.columns("mla", f"{phase}_mla", {"num_heads": heads, "kv_cache_dtype": kv})
    best: dict[tuple[float, ...], float] = {}
    length = rows["isl"] + rows["step"]
    for batch, tokens, latency in zip(
        rows["batch_size"].tolist(), length.tolist(), rows["latency"].tolist(), strict=True
    ):
        at = float(batch), float(tokens)
        best[at] = min(latency * MS, best.get(at, np.inf))
    points = tuple(tuple(sorted({at[axis] for at in best})) for axis in (0, 1))
    context = phase == "context"
    return completed(("batch", "length" if context else "context"), points, best, 2.0 if context else 1.0)


def absorption_table(tables: OperatorTables, heads: int, dtype: str) -> Table:
    """Return seconds by tokens of the two products with latent vectors before and after decoding attention."""
    kind = "fp8" if dtype == "fp8" else "bfloat16"
    parts = []
    for name in ("mla_gen_pre", "mla_gen_post"):
        rows = tables.columns("mla_bmm", "mla_bmm", {"num_heads": heads, "bmm_dtype": kind, "op_name": name})
        at, first = np.unique(rows["num_tokens"], return_index=True)
        parts.append(Table(("tokens",), (tuple(map(float, at)),), tuple((rows["latency"][first] * MS).tolist())))
    at = np.unique(np.concatenate([part.points[0] for part in parts]))
    total = sum(np.asarray(part(at)) for part in parts)
    return Table(("tokens",), (tuple(at.tolist()),), tuple(np.asarray(total).tolist()))


def completed(
    axes: tuple[str, str],
    points: tuple[tuple[float, ...], ...],
    measured: dict[tuple[float, ...], float],
    power: float,
) -> Table:
    """Return the table, filled beyond the largest batches and lengths that were measured together.

    There, time grows with the work: in proportion to the batch, and with the length to the power `power`.
    """
    values = bridge(points, gridded(points, measured))
    beyond = values.copy()
    batches, lengths = (np.array(p) for p in points)
    for j in range(1, len(lengths)):
        grown = beyond[0, j - 1] * (lengths[j] / lengths[j - 1]) ** power
        beyond[0, j] = grown if np.isnan(beyond[0, j]) else beyond[0, j]
    for i in range(1, len(batches)):
        grown = beyond[i - 1] * (batches[i] / batches[i - 1])
        beyond[i] = np.where(np.isnan(beyond[i]), grown, beyond[i])
    return table(axes, points, values, beyond)
