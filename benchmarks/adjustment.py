"""Dynamic adjustment (the paper's section 5.2): how evenly encoding and decoding work, with and without it.

For each case, the mean and the relative standard deviation of the input tokens of an encoding batch, of its seconds, of
B_D (sequences decoded just after a batch has joined) and of an iteration's seconds, over the middle three fifths of a
run, and its throughput. All requests are there at once. Cases are replayed; with `--engine`, a small model runs on this
machine instead, RRA on one rank and WAA on two.

    python -m benchmarks.adjustment
    python -m benchmarks.adjustment --engine
"""

import argparse
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from exegpt.reproduction.evenness import Evenness, evenness
from xcore.policies.adjustment import USUAL_SHARE
from xcore.policies.rra import RRAControl
from xcore.policies.waa import WAAControl
from xcore.requests.request import Request
from xcore.requests.requests import random_requests
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import local_cluster, parse_cluster
from xcore.specs.model import ModelSpec
from xcore.specs.profile import Profile
from xcore.specs.schedule import ModelReference, ProfileReference, Schedule, Stage
from xcore.specs.workload import LengthDistribution, Workload, task
from xprofiler.roofline import roofline_profile
from xscheduler.tune import tune
from xsimulator.replay.event_simulator import replay
from xsimulator.steady.residents import steady_state

MODEL, CLUSTER = "opt-13b", "4xA40"
PAIR = {"micro_batches": 1, "tp_degree": 2, "encode_tp_degree": 2, "encode_devices": 2}
WHOLE = {"tp_degree": 4, "encode_micro_batches": 1}
ENGINE = {
    "rra": Workload(
        "48/40", LengthDistribution.truncated_normal(48, 30, 120), LengthDistribution.truncated_normal(40, 22, 100), 94
    ),
    "waa-c": Workload(
        "100/12", LengthDistribution.truncated_normal(100, 55, 220), LengthDistribution.truncated_normal(12, 7, 30), 28
    ),
}
"""Lengths of the engine's requests, such that WAA's B_D is a small part of them."""
BATCH, ITERATIONS = 8, 8
"""B_E and N_D of the engine's runs."""


@dataclass(frozen=True)
class Case:
    """A schedule of the paper's OPT-13B on four A40s."""

    policy: str
    task: str
    fixed: dict[str, int]

    @property
    def name(self) -> str:
        """Its policy, task and variables."""
        return f"{self.policy} {self.task} B_E={self.fixed['encode_batch']}"

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The schedule of these variables."""
        where = builtin_model(MODEL), parse_cluster(CLUSTER), task(self.task), profile()
        best = tune(*where, policies=(self.policy,), fixed={"replicas": 1, **self.fixed}).schedule
        assert best, self.name
        return best


CASES = (
    Case("rra", "S", WHOLE | {"encode_batch": 52, "decode_iterations": 13}),
    Case("rra", "T", WHOLE | {"encode_batch": 12, "decode_iterations": 16}),
    Case("rra", "C1", WHOLE | {"encode_batch": 8, "decode_iterations": 4}),
    Case("waa-c", "S", PAIR | {"encode_batch": 4}),
    Case("waa-c", "S", PAIR | {"encode_batch": 10}),
    Case("waa-c", "C1", PAIR | {"encode_batch": 8}),
)


@functools.cache
def profile() -> Profile:
    """The roofline of the cases."""
    return roofline_profile(builtin_model(MODEL), parse_cluster(CLUSTER))


def measured(case: Case, share: float | None, count: int) -> Evenness:
    """Replay `count` requests of a case, all there at once."""
    schedule = replace(case.schedule, adjust=share)
    run = replay(schedule, profile(), task(case.task).draw(count, seed=3))
    return evenness(schedule, run.timeline, run.served)


def run_engine(folder: Path, count: int, share: float) -> Iterator[tuple[str, Evenness, Evenness]]:
    """Run a small model under both policies, without and with adjustment."""
    from benchmarks.model_sizes import ModelSizes

    folder.mkdir(exist_ok=True)
    directory = folder / "model"
    if not directory.exists():
        ModelSizes(layers=4, hidden=256, heads=4, ffn=704, vocab=8000, context=256).create(directory, 0, "llama")
    spec = ModelSpec.from_directory(directory)
    every = (0, spec.layers)
    sides = Stage((0,), 1, "encode", None, every), Stage((1,), 1, "decode", None, every)
    for policy, stages in (("rra", (Stage((0,), 1, "both", None, every),)), ("waa-c", sides)):
        workload = ENGINE[policy]
        requests = random_requests(workload.draw(count, 3), spec.vocab, 0)
        resident = round(BATCH * steady_state(workload, ITERATIONS, False, "exact").batch_ratio)
        rra = RRAControl(encode_batch=BATCH, decode_iterations=ITERATIONS, decode_batch=resident)
        waa = WAAControl(encode_batch=BATCH, decode_batch=resident, micro_batches=1)
        control = rra if policy == "rra" else waa
        schedule = Schedule(
            version=Schedule.VERSION,
            policy=policy,
            control=control,
            model=ModelReference(spec, spec.fingerprint),
            cluster=local_cluster(),
            workload=workload,
            profile=ProfileReference("none", ""),
            stages=stages,
            kv_blocks=4000,
            dtype="fp32",
            kv_dtype="fp32",
        )

        plain = _ran(directory, schedule, requests)
        seen = replace(control, decode_batch=round(plain.decode_batch.mean))
        adjusted = _ran(directory, replace(schedule, control=seen, adjust=share), requests)
        yield f"{policy} engine B_E={BATCH}", plain, adjusted


def _ran(directory: Path, schedule: Schedule, requests: Sequence[Request]) -> Evenness:
    """Run requests on as many ranks as a schedule has stages."""
    from benchmarks.job import run_all

    (run,) = run_all(directory, [schedule], requests, len(schedule.stages), 1, directory.parent).runs
    return evenness(schedule, run.timeline, run.served)


def rows(name: str, plain: Evenness, adjusted: Evenness) -> Iterator[str]:
    """Yield a case's lines: without, with, and the ratio of the deviations."""
    for how, one in (("no-adjust", plain), ("adjust", adjusted)):
        cells = "  ".join(map(str, (one.tokens, one.encode_s, one.decode_batch, one.iteration_s)))
        yield f"{name:22}{how:10}{cells}  {one.throughput_seq_s:8.4g}"
    ratios = [
        f"{getattr(adjusted, part).std / getattr(plain, part).std:17.2f}"
        for part in ("tokens", "encode_s", "decode_batch", "iteration_s")
    ]
    yield f"{'':22}{'ratio':10}{'  '.join(ratios)}  {adjusted.throughput_seq_s / plain.throughput_seq_s:8.3f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=USUAL_SHARE)
    parser.add_argument("--requests", type=int, help="default: 12,000, in the engine 600")
    parser.add_argument("--engine", action="store_true", help="run a small model on this machine")
    parser.add_argument("--dir", type=Path, default=Path("exegpt-adjustment"), help="folder of the engine's model")
    asked = parser.parse_args()
    heads = ("tokens of a batch", "encoding, s", "B_D", "iteration, s", "seq/s")
    print(f"{'':32}{'  '.join(f'{head:>17}' for head in heads[:-1])}  {heads[-1]:>8}")
    count = asked.requests or (600 if asked.engine else 12_000)
    if asked.engine:
        results = run_engine(asked.dir, count, asked.share)
    else:
        results = ((case.name, measured(case, None, count), measured(case, asked.share, count)) for case in CASES)
    for case in results:
        print("\n".join(rows(*case)), flush=True)


if __name__ == "__main__":
    main()
