"""What the host takes for one decoding iteration, beside its device: `python -m benchmarks.host_step`.

The engine decodes 64 sequences of about 1,024 tokens with 32 layers, by graphs. Its device is a stand-in: tensors have
no data, and nothing that is queued is done. What is left is deciding, packing and bookkeeping, from one decision to the
next: as elapsed time, and as this process's own CPU time, which other processes leave alone.
"""

import argparse
import cProfile
import itertools
import pstats
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from benchmarks import launches
from benchmarks.launches import META, on_no_device
from xcore.arrays import Array
from xcore.policies.control import Control
from xcore.policies.orca import OrcaControl
from xcore.policies.rra import RRAControl
from xcore.requests.request import Request
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.schedule import BLOCK_SIZE, ModelReference, ProfileReference, Schedule, Stage
from xcore.specs.workload import Workload
from xrunner.comm.gpu import DeviceEvent, Gpu
from xrunner.comm.ranks import Ranks
from xrunner.core.engine import Engine
from xrunner.models import Model, random_model

BATCH, PROMPT, OUTPUT = 64, 512, 1025
POLICIES: dict[str, Control] = {
    "orca": OrcaControl(max_num_seqs=BATCH, prefills_per_step=4),
    "rra": RRAControl(encode_batch=BATCH // 4, decode_batch=BATCH, decode_iterations=OUTPUT // 4),
}
WAYS = {"greedy": 1.0, "repetition penalty": 1.1}
"""Ways to choose tokens → the repetition penalty."""


class Absent(Gpu):
    """A GPU whose copies and graphs take no time and do nothing."""

    def __init__(self) -> None:
        self.device = META
        self._pinned: dict[int, Iterator[torch.Tensor]] = {}

    def pinned(self, count: int) -> torch.Tensor:
        """One of a few that are used in turn, as PyTorch keeps pinned memory."""
        if count not in self._pinned:
            self._pinned[count] = itertools.cycle([torch.zeros(count, dtype=torch.uint8) for _ in range(4)])
        return next(self._pinned[count])

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Tokens that come back are all 0."""

    def moment(self) -> DeviceEvent:
        return Later()

    def begin_graphs(self) -> None:
        """They need no memory."""

    def capture(self, compute: Callable[[], object]) -> Callable[[], None]:
        compute()
        return lambda: None


class Later:
    """An event that is not done at its first query: the next step is queued before it."""

    queried = False

    def query(self) -> bool:
        before, self.queried = self.queried, True
        return before

    def synchronize(self) -> None:
        """It comes."""


class OwnTime(Ranks):
    """A rank alone, whose clock is the CPU time of its process."""

    def clock(self) -> Callable[[], float]:
        return time.process_time


def requests(policy: str, repetition_penalty: float) -> list[Request]:
    """So many that the batch is full most of the time: under RRA a quarter of it leaves and joins at a time."""
    rng = np.random.default_rng(0)
    varied = rng.integers(OUTPUT // 2, 3 * OUTPUT // 2, 3 * BATCH).tolist()
    lengths = [OUTPUT] * len(varied) if policy == "rra" else varied
    pairs = zip(rng.integers(1000, size=(len(lengths), PROMPT)).tolist(), lengths, strict=True)
    return [
        Request(str(i), tuple(prompt), n, ignore_eos=True, repetition_penalty=repetition_penalty)
        for i, (prompt, n) in enumerate(pairs)
    ]


def steps(model: Model, policy: str, repetition_penalty: float, ranks: Ranks) -> Array:
    """Microseconds by the ranks' clock from a decision to decode a full batch to the next one: float [iterations]."""
    schedule = Schedule(
        Schedule.VERSION,
        policy,
        POLICIES[policy],
        model=ModelReference(model.spec, model.spec.fingerprint),
        cluster=parse_cluster("1xH100-SXM"),
        workload=Workload.fixed(PROMPT, OUTPUT),
        profile=ProfileReference("roofline", "0"),
        stages=(Stage((0,), 1, "both", None, (0, model.spec.layers)),),
        kv_blocks=BATCH * -(-(PROMPT + 2 * OUTPUT) // BLOCK_SIZE),
        dtype="bf16",
        kv_dtype="bf16",
    )
    engine = Engine(model, schedule, ranks, gpu=Absent())
    spans = engine.run(requests(policy, repetition_penalty)).timeline.spans
    full = (b.start_s - a.start_s for a, b in itertools.pairwise(spans) if (a.phase, a.sequences) == ("decode", BATCH))
    return 1e6 * np.fromiter(full, dtype=float)


def main(arguments: list[str] | None = None) -> int:
    """Print the host's time by policy and way of sampling, then each architecture's launches."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_step", description=__doc__)
    parser.add_argument("--profile", action="store_true", help="say where the time goes (cProfile, which adds its own)")
    profiled = parser.parse_args(arguments).profile
    spec = replace(builtin_model("llama-3.1-8b"), hidden=64, heads=4, kv_heads=1, head_size=16, ffn=96, context=8192)
    print("Microseconds of the host for one decoding iteration, median (95th percentile)")
    with on_no_device():
        model = random_model(spec, dtype="bf16", device=META)
        for policy, (name, penalty) in itertools.product(POLICIES, WAYS.items()):
            elapsed, cpu = (steps(model, policy, penalty, ranks()) for ranks in (Ranks, OwnTime))
            figures = [f"{np.median(times):.0f} ({np.percentile(times, 95):.0f})" for times in (elapsed, cpu)]
            print(f"{policy:4}, {name}: elapsed {figures[0]}, CPU {figures[1]}, {len(cpu):,} iterations", flush=True)
            if profiled:
                with cProfile.Profile() as profile:
                    steps(model, policy, penalty, Ranks())
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    return launches.main()


if __name__ == "__main__":
    raise SystemExit(main())
