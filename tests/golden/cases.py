"""What the golden files hold: schedules of every policy on one and on two devices, over lists of requests.

Rewritten by `python -m tests.golden`, and only where a change of the results is meant.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.xcore.small_specs import profile as one_degree
from tests.xrunner.cells import LENGTHS, POLICIES, SIZES, disaggregated, schedule
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import Schedule
from xcore.specs.workload import RequestLengths
from xsimulator.replay.event_simulator import replay

HERE = Path(__file__).parent
SPEC = ModelSpec("tiny", "llama", **(SIZES | {"kv_heads": 2, "head_size": 16, "gated": True}))
LAYOUTS = {"1": (1,), "2 stages": (1, 1), "TP2": (2,)}
FIGURES = ("start_s", "first_token_s", "finish_s")


def profile() -> Any:
    """Plain lines for one device, and two thirds of their seconds for a device of two."""
    single = one_degree(SPEC)
    (degree,) = single.degrees

    def faster(table: Any) -> Any:
        return replace(table, values=tuple(value * 2 / 3 for value in table.values))

    names = ("rest", "encode_attention", "chunk_attention", "decode_attention")
    layer = replace(degree.decoder, **{name: faster(getattr(degree.decoder, name)) for name in names})
    return replace(single, degrees=(degree, replace(degree, tp=2, decoder=layer)))


def schedules(spec: ModelSpec = SPEC) -> dict[str, Schedule]:
    """By policy and layout; one with replicas, one with little memory and one with much."""
    layouts = LAYOUTS.items()
    plans = {f"{policy}, {name}": schedule(spec, policy, degrees) for policy in POLICIES for name, degrees in layouts}
    plans |= {f"waa-m, {m} micro-batches": disaggregated(spec, (1,), (1,), micro_batches=m) for m in (1, 2)}
    plans |= {f"{policy}, replicas": schedule(spec, policy, (1,), replicas=2) for policy in ("orca", "rra")}
    return plans | {f"{policy}, much memory": schedule(spec, policy, (1,), 400) for policy in POLICIES}


def request_lists() -> dict[str, list[RequestLengths]]:
    """The runner's lengths at once, and eighty random ones that arrive over time."""
    rng = np.random.default_rng(13)
    arrivals = rng.exponential(0.004, 80).cumsum().tolist()
    inputs, outputs = rng.integers(1, 65, 80).tolist(), rng.integers(1, 31, 80).tolist()
    return {
        "at once": [RequestLengths(n, m) for n, m in LENGTHS],
        "over time": [RequestLengths(*lengths) for lengths in zip(inputs, outputs, arrivals, strict=True)],
    }


def replays() -> dict[str, list[list[float]]]:
    """Of every schedule over every list: each request's start, first token and finish, in seconds."""
    figures = {}
    for name, plan in schedules().items():
        for requests, lengths in request_lists().items():
            served = sorted(replay(plan, profile(), lengths).served, key=lambda request: request.index)
            figures[f"{name}, {requests}"] = [
                [float(f"{getattr(request, figure):.12g}") for figure in FIGURES] for request in served
            ]
    return figures


def read(name: str) -> dict[str, Any]:
    """A golden file."""
    return json.loads((HERE / name).read_text())


def write(name: str, figures: dict[str, Any]) -> None:
    """Write a golden file, a case a line."""
    lines = (f"{json.dumps(case)}: {json.dumps(rows, separators=(',', ':'))}" for case, rows in figures.items())
    (HERE / name).write_text("{\n" + ",\n".join(lines) + "\n}\n")
