"""Two models on one device of this machine beside their plan: each one's share of it and latencies; and what moving
quotas, and merged blocks, give over fixed quotas when one model has most of the load.

Both models are random Llamas of different shapes in float32, on one thread, measured first. Requests come as a Poisson
process; the simulator gets the same ones.

    python -m benchmarks.shared_device
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from benchmarks.model_sizes import ModelSizes
from benchmarks.servers import orca
from xcore.requests.request import Request, Result
from xcore.specs.cluster_plan import PlannedModel, Share
from xcore.specs.profile import Profile
from xcore.specs.request_times import summarise
from xcore.specs.workload import RequestLengths, Workload
from xcore.traces.arrivals import random_arrivals
from xmulti.rank.rank_unit import RankUnit
from xmulti.serving.serving_unit import options_of
from xmulti.sharing.replay import replay_unit
from xmulti.sharing.unit_loads import loads_of, overhead_of, rule_of
from xprofiler.profiles import measured_profile
from xrunner.comm.ranks import Ranks
from xrunner.models.device import CPU


@dataclass(frozen=True)
class Shape:
    """A model, and its requests."""

    sizes: ModelSizes
    prompt: int
    """Mean; lengths are uniform between half of it and one and a half."""
    output: int
    rate: float
    """Requests/s at an even load."""


MODELS = {
    "usual": {
        "wide": Shape(ModelSizes(4, 512, 8, 1376, 8000, 512, kv_heads=8), 64, 48, 2.5),
        "deep": Shape(ModelSizes(8, 256, 4, 688, 8000, 512, kv_heads=2), 128, 96, 1.2),
    },
    "other": {
        "wide": Shape(ModelSizes(2, 768, 12, 2048, 4000, 512, kv_heads=4), 96, 32, 2.0),
        "deep": Shape(ModelSizes(6, 320, 5, 864, 16000, 512, kv_heads=5), 48, 80, 1.5),
    },
}
"""The costs of sharing were found on the usual ones; on the others they are looked at alone."""


@dataclass(frozen=True)
class Figures:
    """What one model's requests came to."""

    share: float
    """Of the device's time."""
    latency_s: float
    """Mean, from arrival."""
    p99_s: float
    seconds: float
    """Until the last one's end."""
    preemptions: int


def requests(name: str, shape: Shape, num: int, rate: float, seed: int) -> list[Request]:
    """Random prompts at Poisson arrivals."""
    draw, prompt, output = np.random.default_rng([seed, len(name)]), shape.prompt, shape.output
    arrivals = random_arrivals(rate, num, (seed, ord(name[0])))
    return [
        Request(
            f"{name}-{i}",
            tuple(draw.integers(3, shape.sizes.vocab, draw.integers(prompt // 2, 3 * prompt // 2)).tolist()),
            int(draw.integers(output // 2, 3 * output // 2)),
            ignore_eos=True,
            arrival_s=float(arrival),
        )
        for i, arrival in enumerate(arrivals)
    ]


def planned(
    directories: Mapping[str, Path], shapes: Mapping[str, Shape], share: Share, blocks: int
) -> list[PlannedModel]:
    """Both models on device 0, with so many KV blocks each."""
    unknown = summarise((), 0.0)
    models = []
    for name, directory in directories.items():
        workload = Workload.fixed(shapes[name].prompt, shapes[name].output)
        schedule = replace(orca(directory, 64), workload=workload, kv_blocks=blocks, admission="grow")
        models.append(PlannedModel(name, (0,), schedule, unknown, 1.0, share=share))
    return models


def measured(
    models: Sequence[PlannedModel],
    directories: Mapping[str, Path],
    profiles: Mapping[str, Profile],
    todo: Mapping[str, list[Request]],
    fixed: bool = False,
) -> dict[str, Figures]:
    """Run them, in the order that their rule of sharing asks for; `fixed`: in quotas that stay."""
    unit = RankUnit.load(models, directories)
    for tenant in unit.tenants:
        tenant.least = None if fixed else tenant.least
    unit.open(options={model.name: options_of(model, profiles[model.name], spans=False) for model in models})
    results: dict[str, list[Result]] = {name: [] for name in todo}
    for name, some in todo.items():
        for request in some:
            unit.add(name, request)
    while not unit.idle:
        if not unit.step():
            unit.wait()
        for name in todo:
            results[name] += [event for event in unit.take(name) if isinstance(event, Result)]
    busy = {tenant.name: tenant.busy_s for tenant in unit.tenants}
    preempted = {tenant.name: tenant.ledger.preemptions for tenant in unit.tenants}
    unit.drain()
    unit.close()
    end_s = max(result.finish_s for some in results.values() for result in some)
    return {
        name: _figures([r.finish_s - r.arrival_s for r in some], busy[name] / end_s, end_s, preempted[name])
        for name, some in results.items()
    }


def predicted(
    models: Sequence[PlannedModel],
    profiles: Mapping[str, Profile],
    todo: Mapping[str, list[Request]],
    fixed: bool = False,
) -> dict[str, Figures]:
    """Replay them."""
    lengths = {
        name: [RequestLengths(len(r.prompt_ids), r.max_tokens, r.arrival_s) for r in some]
        for name, some in todo.items()
    }
    loads = loads_of(models, profiles, lengths)
    if fixed:
        loads = [replace(load, least=None) for load in loads]
    share = models[0].share
    assert share, "they share a device"
    replay = replay_unit(loads, rule_of(share), overhead=overhead_of(models, profiles))
    return {
        name: _figures(
            [one.finish_s - one.arrival_s for one in served],
            replay.busy_s[name] / replay.seconds,
            replay.seconds,
            replay.preemptions[name],
        )
        for name, served in replay.served.items()
    }


def _figures(latencies: Sequence[float], share: float, seconds: float, preemptions: int) -> Figures:
    return Figures(share, statistics.mean(latencies), float(np.percentile(latencies, 99)), seconds, preemptions)


def print_both(what: str, real: Mapping[str, Figures], expected: Mapping[str, Figures]) -> None:
    """Measured beside predicted."""
    print(what)
    for name, figures in real.items():
        other = expected[name]
        pairs = [
            f"{label} {getattr(figures, key):.3g} / {getattr(other, key):.3g}"
            for label, key in (("share", "share"), ("mean s", "latency_s"), ("p99 s", "p99_s"))
        ]
        print(f"  {name}: {', '.join(pairs)}, preemptions {figures.preemptions} / {other.preemptions}")


def one_round(
    directories: Mapping[str, Path], shapes: Mapping[str, Shape], asked: argparse.Namespace
) -> dict[str, list[float]]:
    """Measure both models' layers, then run and replay them at an even and at a skewed load; each figure's measured
    value over the predicted one, by what it is of.
    """
    profiles = {n: measured_profile(d, "fp32", Ranks(), CPU, "triton").profile for n, d in directories.items()}
    rates = asked.rates or [shape.rate for shape in shapes.values()]
    todo = {
        name: requests(name, shape, asked.requests, rate, asked.seed)
        for (name, shape), rate in zip(shapes.items(), rates, strict=True)
    }
    ratios: dict[str, list[float]] = {}
    for share in (Share("time"), Share("priority", pool="merged")):
        models = planned(directories, shapes, share, 1000)
        real, expected = measured(models, directories, profiles, todo), predicted(models, profiles, todo)
        print_both(f"shared by {share.by}, measured / predicted", real, expected)
        ratios |= {f"share, by {share.by}": [real[n].share / expected[n].share for n in shapes]}
        ratios |= {f"mean latency, by {share.by}": [real[n].latency_s / expected[n].latency_s for n in shapes]}
    return ratios | under_skewed_load(directories, shapes, asked, profiles)


MEMORY: dict[str, tuple[Literal["quotas", "merged"], bool]] = {
    "fixed quotas": ("quotas", True),
    "quotas": ("quotas", False),
    "merged blocks": ("merged", False),
}
"""Ways to share memory: `Share.pool`, and whether quotas stay."""


def under_skewed_load(
    directories: Mapping[str, Path],
    shapes: Mapping[str, Shape],
    asked: argparse.Namespace,
    profiles: Mapping[str, Profile],
) -> dict[str, list[float]]:
    """Run and replay more requests of one model than its quota has room for, and a few of the other."""
    todo = {
        name: requests(name, shapes[name], num, rate, asked.seed + 1)
        for name, num, rate in (("wide", asked.skewed, asked.skewed_rate), ("deep", 4, 0.5))
    }
    ends: dict[str, tuple[float, float]] = {}
    for memory, (pool, fixed) in MEMORY.items():
        models = planned(directories, shapes, Share("time", pool=pool), asked.blocks)
        real = measured(models, directories, profiles, todo, fixed)
        expected = predicted(models, profiles, todo, fixed)
        print_both(f"skewed load, {memory}, measured / predicted", real, expected)
        ends[memory] = real["wide"].seconds, expected["wide"].seconds
    ratios = {}
    for memory in ("quotas", "merged blocks"):
        gains = [fixed / other for fixed, other in zip(ends["fixed quotas"], ends[memory], strict=True)]
        print(f"{memory} are done {gains[0]:.3f} times as fast as fixed quotas, predicted {gains[1]:.3f}")
        ratios[f"gain of {memory} over fixed quotas"] = [gains[0] / gains[1]]
        ratios[f"the same, measured; {memory}"] = [gains[0]]
    return ratios


def _rates(text: str) -> list[float]:
    return [float(rate) for rate in text.split(",")]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="each with layers measured anew")
    parser.add_argument("--requests", type=int, default=60, help="of each model")
    parser.add_argument("--models", choices=MODELS, default="usual", help="which two")
    parser.add_argument("--seed", type=int, default=1, help="of the requests")
    parser.add_argument("--rates", type=_rates, help="requests/s of both at an even load, like 2.5,1.2")
    parser.add_argument("--skewed", type=int, default=480, help="requests of the first under skewed load")
    parser.add_argument("--skewed-rate", type=float, default=60.0, help="and how many of them arrive per second")
    parser.add_argument("--blocks", type=int, default=100, help="KV blocks of each model under skewed load")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    shapes = MODELS[asked.models]
    began, rounds = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        directories = {name: Path(folder) / name for name in shapes}
        for number, (name, shape) in enumerate(shapes.items()):
            shape.sizes.create(directories[name], seed=number)
        for number in range(asked.rounds):
            os.environ["EXEGPT_CACHE"] = f"{folder}/{number}"  # measured now: the machine changes its speed in minutes
            print(f"round {number + 1}")
            rounds.append(one_round(directories, shapes, asked))
    print(f"median of {asked.rounds} rounds, measured over predicted, of {', '.join(shapes)}:")
    for what in rounds[0]:
        each = zip(*(ratios[what] for ratios in rounds), strict=True)
        print(f"  {what}: {', '.join(f'{statistics.median(one):.2f}' for one in each)}")
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
