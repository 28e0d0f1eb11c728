"""Orders of the requests of two models that share a device: latencies per token of replays under overload.

Llama-3.1-8B and OPT-13B share one A100-80GB (rooflines). Lengths are log-normal: those of OPT-13B are twice as long.
Rankers are simulated. Run as `python -m benchmarks.orders_of_a_plan`.
"""

from dataclasses import replace
from typing import Literal

import numpy as np

from xcore.policies.orca import OrcaControl
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.cluster_plan import Plan, PlannedModel, Share
from xcore.specs.request_times import RequestTimes, summarise
from xcore.specs.schedule import ModelReference, ProfileReference, Schedule, Stage
from xcore.specs.workload import LengthDistribution, RequestLengths, task
from xmulti.sharing.plan_order import PlanOrder, replayed_order
from xmulti.sharing.plan_replay import replay_plan
from xprofiler.roofline import roofline_profile

NAMES = {"llama-3.1-8b": 150.0, "opt-13b": 300.0}
"""Built-in models, each with the mean of its outputs in tokens."""
RATE_SEQ_S = {"light": 0.5, "overload": 8.0}
"""Requests per second of each model."""
SECONDS = 60.0
SPREAD = 0.9
"""Standard deviation of the logarithm of output lengths."""
CLUSTER = parse_cluster("1xA100-80GB")
PROFILES = {name: roofline_profile(builtin_model(name), CLUSTER) for name in NAMES}
SHARES: dict[str, Share] = {
    "time": Share("time"),
    "priority": Share("priority", pool="merged"),
    "space": Share("space", 0.5),
}
ORDERS: dict[str, tuple[Literal["fcfs", "learned", "sjf"], float | None]] = {
    "FCFS": ("fcfs", None),
    "learned, tau 0.55": ("learned", 0.55),
    "learned, tau 0.62": ("learned", 0.62),
    "SJF oracle": ("sjf", None),
}


def requests_at(rate_seq_s: float) -> dict[str, list[RequestLengths]]:
    """Return a minute of Poisson arrivals of both models, with drawn lengths."""
    of_models = {}
    for seed, (name, mean) in enumerate(NAMES.items()):
        rng = np.random.default_rng(seed)
        count = int(rate_seq_s * SECONDS)
        arrivals = np.cumsum(rng.exponential(1 / rate_seq_s, count)).tolist()
        drawn = rng.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, count)
        outputs = np.clip(np.rint(drawn), 1, 1500).astype(int).tolist()
        of_models[name] = [RequestLengths(160, o, a) for o, a in zip(outputs, arrivals, strict=True)]
    return of_models


def plan_of(share: Share) -> Plan:
    """Return a plan in which both models share the device; planned outputs are other draws than the requests'."""
    models = []
    for seed, (name, mean) in enumerate(NAMES.items()):
        spec = builtin_model(name)
        drawn = np.random.default_rng(100 + seed).lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, 2000)
        outputs = LengthDistribution.from_samples(np.clip(np.rint(drawn), 1, 1500).astype(np.int64))
        schedule = Schedule(
            version=Schedule.VERSION,
            policy="orca",
            control=OrcaControl(max_num_seqs=64, prefills_per_step=4),
            model=ModelReference(spec, spec.fingerprint),
            cluster=CLUSTER,
            workload=replace(task("T"), input=LengthDistribution.fixed(160)).with_outputs(outputs),
            profile=ProfileReference("roofline", "0"),
            stages=(Stage((0,), 1, "both", None, (0, spec.layers)),),
            kv_blocks=1200,
            dtype="fp16",
            kv_dtype="fp16",
            admission="grow",
        )
        models.append(PlannedModel(name, (0,), schedule, summarise((), 0.0), share=share))
    return Plan(Plan.VERSION, "exegpt", CLUSTER, tuple(models))


def replayed(
    plan: Plan, requests: dict[str, list[RequestLengths]], order: PlanOrder | None
) -> dict[str, tuple[RequestTimes, ...]]:
    """Return each model's served requests."""
    replays = replay_plan(plan, lambda model: PROFILES[model.name], requests, order=order)
    return {name: of_model.served for name, of_model in replays.items()}


def mean_per_token_s(served: dict[str, tuple[RequestTimes, ...]]) -> float:
    """Return the mean over all requests of both models of latency over output tokens."""
    rows = [(s.finish_s - s.arrival_s) / s.output_tokens for of_model in served.values() for s in of_model]
    return float(np.mean(rows))


def main() -> None:
    """Print the mean latency per token, and the mean latency, of each rule of sharing and each order."""
    for load, rate_seq_s in RATE_SEQ_S.items():
        requests = requests_at(rate_seq_s)
        for rule, share in SHARES.items():
            plan, first_s = plan_of(share), 0.0
            for label, (name, tau) in {"the method's": (None, None), **ORDERS}.items():
                served = replayed(plan, requests, replayed_order(name, tau, requests))
                per_token_s = mean_per_token_s(served)
                first_s = per_token_s if name == "fcfs" else first_s
                latency_s = float(np.mean([s.finish_s - s.arrival_s for each in served.values() for s in each]))
                gain = f"{first_s / per_token_s:.3g}" if first_s else "-"
                print(
                    f"{load:8}  {rule:8}  {label:18} {per_token_s * 1e3:7.4g} ms per token  {latency_s:6.3g} s  {gain}"
                )


if __name__ == "__main__":
    main()
