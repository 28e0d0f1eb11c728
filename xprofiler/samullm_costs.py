"""SamuLLM's published cost points as a `CostTable` (puddingfjz/vllm; specification section 1).

Three files in a folder: `periter_cost_points.csv` (timed iterations), `model_coeffs_and_load_costs.json` (loading
seconds), `outlen_pdf_norobots.csv` (output lengths over 10,000 No Robots prompts).
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xcore import document
from xcore.errors import InputError
from xcore.rows import csv_rows
from xcore.specs.cost_table import CostTable, DegreeCosts, ModelCosts, PhaseLines
from xcore.specs.workload import LengthDistribution

POINTS, LOADING, OUTPUTS = "periter_cost_points.csv", "model_coeffs_and_load_costs.json", "outlen_pdf_norobots.csv"
HOST = "init_cost_s_zxcpu_8xA100_80G"
"""The loading times of the machine that the paper measures on: NVLink pairs of A100-80GB."""
_COLUMNS = ("model", "tp", "phase", "num_seqs", "tot_ctx_len", "max_seq_len", "tflops_logged")
_SECONDS = ("exec_s", "prep_s", "sample_s")


@dataclass(frozen=True)
class TimedIteration:
    """One timed iteration."""

    batch: int
    total: int
    """Sum of all lengths."""
    longest: int
    macs: float
    """Multiply-accumulates of one GPU."""
    seconds: tuple[float, float, float]
    """Computing, preparing inputs, sampling."""


def samullm_costs(folder: Path) -> CostTable:
    """Return the cost table of all models in SamuLLM's files.

    Raises:
        InputError: A file is missing or can't be read.
    """
    points, outputs = _points(folder / POINTS), _outputs(folder / OUTPUTS)
    loading = _loading(folder / LOADING)
    models = []
    for name, of_model in points.items():
        degrees = tuple(_degree(tp, phases, loading.get((name, tp))) for tp, phases in sorted(of_model.items()))
        context = max(p.longest for phases in of_model.values() for p in itertools.chain(*phases.values()))
        models.append(ModelCosts(name, context, degrees, outputs.get(name)))
    return CostTable(CostTable.VERSION, "samullm", "8xA100-80GB", tuple(models))


def read_points(folder: Path) -> Mapping[str, Mapping[int, Mapping[str, Sequence[TimedIteration]]]]:
    """Return timed iterations by model, degree and phase."""
    return _points(folder / POINTS)


def output_lengths(folder: Path) -> dict[str, LengthDistribution]:
    """Return the output lengths of all models, including those without timings."""
    return _outputs(folder / OUTPUTS)


def loading_seconds(folder: Path) -> dict[tuple[str, int], float]:
    """Return the loading seconds by model and degree, including models without timings."""
    return _loading(folder / LOADING)


def _points(path: Path) -> dict[str, dict[int, dict[str, list[TimedIteration]]]]:
    """Return timed iterations by model, degree and phase."""
    found: dict[str, dict[int, dict[str, list[TimedIteration]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for row in csv_rows(path, *_COLUMNS, *_SECONDS, what="cost table"):
        batch, total, longest = (row.whole(key) for key in ("num_seqs", "tot_ctx_len", "max_seq_len"))
        exec_s, prep_s, sample_s = (row.number(key) for key in _SECONDS)
        point = TimedIteration(batch, total, longest, 1e12 * row.number("tflops_logged"), (exec_s, prep_s, sample_s))
        found[row["model"]][row.whole("tp")][row["phase"]].append(point)
    return found


def _degree(tp: int, phases: dict[str, list[TimedIteration]], load_s: float | None) -> DegreeCosts:
    """Return the lines of one degree.

    Work per token and position comes from the FLOPs of the two extreme single prompts.
    """
    if set(phases) != {"prefill", "decode"}:
        raise InputError(
            f"'{POINTS}' has only the phases {sorted(phases)} at degree {tp}, but both phases are needed: add the "
            "other."
        )
    single = [point for point in phases["prefill"] if point.batch == 1]
    short, long = min(single, key=lambda p: p.total), max(single, key=lambda p: p.total)
    if short.total == long.total:
        raise InputError(
            f"'{POINTS}' has prompts of only one length at degree {tp}, which is too few for a line: add another "
            "length."
        )
    per_position = (long.macs / long.total - short.macs / short.total) / (long.total - short.total)
    per_token = short.macs / short.total - per_position * short.total
    # the longest batches filled the cache, if a context allowed it
    kv_tokens = max(point.total for point in phases["decode"])
    lines = {phase: _lines(points) for phase, points in phases.items()}
    return DegreeCosts(tp, per_token, per_position, kv_tokens, load_s, lines["prefill"], lines["decode"])


def _lines(points: Sequence[TimedIteration]) -> PhaseLines:
    """Return, for each batch, the lines through the two extreme points of computing, preparing, and sampling."""
    batches = sorted({point.batch for point in points})
    of_batch = [[point for point in points if point.batch == batch] for batch in batches]
    compute = [_line([(p.macs, p.total, p.seconds[0]) for p in some]) for some in of_batch]
    prepare = [_line([(float(p.batch * p.longest), p.longest, p.seconds[1]) for p in some]) for some in of_batch]
    sample = [_line([(float(p.total), p.total, p.seconds[2]) for p in some]) for some in of_batch]
    return PhaseLines(tuple(batches), tuple(compute), tuple(prepare), tuple(sample))


def _line(points: Iterable[tuple[float, int, float]]) -> tuple[float, float]:
    """Return slope and intercept through the extremes of (x, length, seconds).

    Lengths one token apart are repeats: the slower one has sometimes waited 0.1 s for something else, so only the
    faster counts. If noise makes the longer one faster, the line is flat. If memory bounds an iteration, the slope is
    that of attention, and the intercept is negative.
    """
    repeats: list[list[tuple[float, int, float]]] = []
    for point in sorted(points, key=lambda p: p[1]):
        if repeats and point[1] - repeats[-1][-1][1] <= 1:
            repeats[-1].append(point)
        else:
            repeats.append([point])
    near, far = repeats[0], repeats[-1]
    (x0, y0), (x1, y1) = (
        (pick(x for x, _, _ in some), min(seconds for _, _, seconds in some))
        for pick, some in ((min, near), (max, far))
    )
    slope = max(0.0, (y1 - y0) / (x1 - x0)) if x1 > x0 else 0.0
    return slope, (y0 - slope * x0 if slope else min(y0, y1))


def _loading(path: Path) -> dict[tuple[str, int], float]:
    """Return seconds by model (as the points name it) and degree."""
    data = document.read_json(path)
    try:
        return {(row["model"].rsplit("/", 1)[-1], int(row["tp"])): float(row["value"]) for row in data[HOST]}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InputError(f"'{path}' has no list '{HOST}' of loading seconds by model and tp: add it.") from None


def _outputs(path: Path) -> dict[str, LengthDistribution]:
    """Return the output lengths by model; probabilities of measured lengths, normalised."""
    lengths: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in csv_rows(path, "model", "out_len", "prob", what="cost table"):
        lengths[row["model"]].append((row.whole("out_len"), row.number("prob")))
    distributions = {}
    for name, pairs in lengths.items():
        ordered = sorted(pairs)
        weights = np.array([probability for _, probability in ordered])
        shares = tuple((weights / weights.sum()).tolist())
        distributions[name] = LengthDistribution(tuple(length for length, _ in ordered), shares)
    return distributions
