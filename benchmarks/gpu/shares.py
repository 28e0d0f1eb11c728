"""Shares of the multiprocessors: whether a matrix product on a share takes as much longer, and two models that decode
on half of them each, beside each other and in turns.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.model_sizes import ModelSizes
from benchmarks.servers import orca
from xcore.requests.request import Request, Result
from xcore.requests.requests import random_requests
from xcore.specs.cluster_plan import PlannedModel, Share
from xcore.specs.request_times import summarise
from xcore.specs.workload import RequestLengths
from xmulti.rank.multiprocessors import streams_on_shares
from xmulti.rank.rank_unit import RankUnit
from xrunner.comm.gpu import Gpu

SIZES = ModelSizes(layers=12, hidden=2048, heads=16, kv_heads=8, ffn=5632, vocab=32000, context=2048)
PRODUCT = 8192
"""Rows and columns of the matrices, so many that a product has work for all multiprocessors many times over."""


def product_times(device: torch.device, shares: Sequence[float] = (0.25, 0.5, 1.0)) -> list[dict[str, object]]:
    """A matrix product on each share, over its time on the whole device; failed where a quarter isn't felt."""
    x = torch.randn(PRODUCT, PRODUCT, dtype=torch.bfloat16, device=device)
    whole, rows = graph_seconds(device, lambda: x @ x), list[dict[str, object]]()
    for share in shares:
        (stream,) = streams_on_shares(device, [share])
        torch.cuda.synchronize(device)
        with torch.cuda.stream(stream):
            longer = graph_seconds(device, lambda: x @ x) / whole
        rows.append({"share": share, "times_as_long": longer})
        if share == 0.25 and longer < 2:
            rows[-1]["failed"] = f"a product on a quarter takes {longer:.2f} times as long as on all"
    return rows


def graph_seconds(device: torch.device, compute: Callable[[], object]) -> float:
    """Median seconds of a graph that is captured and replayed on the current stream, as the runner does."""
    replay = Gpu(device).capture(compute)
    moments = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(7)]
    for begin, end in moments:
        begin.record()
        replay()
        end.record()
    torch.cuda.synchronize(device)
    return float(statistics.median(begin.elapsed_time(end) for begin, end in moments)) / 1e3


def model_times(device: torch.device, requests: int = 128) -> list[dict[str, object]]:
    """Seconds for both models' requests in turns and beside each other; failed where tokens aren't the same."""
    with tempfile.TemporaryDirectory() as folder:
        directories = {name: Path(folder) / name for name in "ab"}
        for seed, directory in enumerate(directories.values()):
            SIZES.create(directory, seed=seed, dtype="bf16")
        models = [planned(name, path, "bf16") for name, path in directories.items()]
        lengths = [RequestLengths(128 + 8 * (i % 32), 64 + 4 * (i % 16)) for i in range(requests)]
        todo = {name: random_requests(lengths, SIZES.vocab, seed) for seed, name in enumerate(directories)}
        streams = streams_on_shares(device, [0.5, 0.5])
        (turns_s, turns), (beside_s, beside) = (
            timed_run(models, directories, todo, device, chosen) for chosen in ([], streams)
        )
    row: dict[str, object] = {"in_turns_s": turns_s, "beside_s": beside_s, "gain": turns_s / beside_s}
    differ = sum(turns[key] != beside[key] for key in turns)
    return [row | ({"failed": f"{differ} of {len(turns)} outputs are others beside each other"} if differ else {})]


def timed_run(
    models: Sequence[PlannedModel],
    directories: Mapping[str, Path],
    todo: Mapping[str, Sequence[Request]],
    device: torch.device,
    streams: Sequence[torch.cuda.Stream],
) -> tuple[float, dict[tuple[str, str], tuple[int, ...]]]:
    """Seconds until all requests are done, and their tokens by model and id."""
    unit = RankUnit.load(models, directories, device=device, streams=streams)
    unit.open()
    began, tokens = time.perf_counter(), dict[tuple[str, str], tuple[int, ...]]()
    for name, requests in todo.items():
        for request in requests:
            unit.add(name, request)
    while not unit.idle:
        if not unit.step():
            unit.wait()
        for name in todo:
            done = [event for event in unit.take(name) if isinstance(event, Result)]
            tokens |= {(name, result.id): result.output_ids for result in done}
    seconds = time.perf_counter() - began
    unit.drain()
    unit.close()
    return seconds, tokens


def planned(name: str, directory: Path, dtype: str) -> PlannedModel:
    """A model with half of the multiprocessors, of which 64 requests run at once."""
    schedule = replace(orca(directory, 64), dtype=dtype, kv_dtype=dtype)
    unknown = summarise((), 0.0)
    return PlannedModel(name, (0,), schedule, unknown, 1.0, share=Share("space", 0.5), directory=str(directory))
