"""Orders under a latency bound: accepted requests may be passed in the queue, and should be in time all the same.

Admission control decides as in a server. Its engine is a replica in simulated time, with the true lengths. Requests
come at about twice the rate that it sustains. Run as `python -m benchmarks.orders_under_a_bound`.
"""

import asyncio
import math
from dataclasses import replace

import numpy as np

from xcore.arrays import Array
from xcore.batching import Hints, Order, Sequence
from xcore.orders import make_order
from xcore.orders.noise import noisy_scores
from xcore.orders.promised import Promised
from xcore.policies.orca import OrcaControl
from xcore.requests.engine_protocol import Opened
from xcore.requests.request import Request
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.schedule import ModelReference, ProfileReference, Schedule, Stage
from xcore.specs.workload import task
from xprofiler.roofline import roofline_profile
from xserver.admission.admission_control import Admission
from xserver.engines.engine_link import Output
from xserver.http.api_error import ApiError
from xsimulator.cost.cost_model import ReplicaCost
from xsimulator.replay.event_queue import events
from xsimulator.replay.record import Record
from xsimulator.replay.replica import Replica, micro_batching_of

TAU = 0.62
"""Kendall's tau of the ranker, as on LMSYS-Chat."""
REQUESTS = 1500
_MODEL, _CLUSTER = builtin_model("opt-13b"), parse_cluster("1xA100-80GB")
_PROFILE = roofline_profile(_MODEL, _CLUSTER)
_SCHEDULE = Schedule(
    version=Schedule.VERSION,
    policy="orca",
    control=OrcaControl(max_num_seqs=16, prefills_per_step=1),
    model=ModelReference(_MODEL, _MODEL.fingerprint),
    cluster=_CLUSTER,
    workload=task("T"),
    profile=ProfileReference("roofline", "0"),
    stages=(Stage((0,), 1, "both", None, (0, _MODEL.layers)),),
    kv_blocks=2000,
    dtype="fp16",
    kv_dtype="fp16",
    admission="grow",
)


class Clock:
    """A clock that its user sets."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.s


class SimulatedServer:
    """A server with a bound, whose engine runs in simulated time."""

    def __init__(self, bound_s: float, order: Order, requests: int):
        """Create an idle server for so many requests."""
        schedule = replace(_SCHEDULE, latency_bound_s=bound_s)
        self.clock, self.bound_s = Clock(), bound_s
        self.present: list[Output] = []
        self.admission = Admission(Opened(schedule, _PROFILE, None, (), 0.0), lambda: self.present, 1000, self.clock)
        self.record = Record(requests, micro_batching_of(schedule).index, False)
        cost = ReplicaCost.of(schedule, _PROFILE)
        self.replica = Replica(schedule, cost, self.record, micro_batching_of(schedule), order=order, step_by_step=True)
        self.running: dict[int, tuple[Sequence, Output]] = {}
        self.due_s: dict[int, float] = {}
        self._ended = 0

    def run(self, until: float = math.inf) -> None:
        """Let the engine run, and admission learn of its tokens."""
        for now in events([self.replica], until):
            self.clock.s = max(self.clock.s, now)
            self.settle()
            if self.admission.stepped():
                self.admission._took_s = 0.0  # the table costs no simulated time
                asyncio.run(self.admission.update())
        if until < math.inf:
            self.clock.s = until
        self.settle()

    def settle(self) -> None:
        """Report the tokens and the ends so far."""
        for served in self.record.served[self._ended :]:
            _, output = self.running.pop(served.index)
            output.tokens = [0] * served.output_tokens
            self.present.remove(output)
            self.admission.ended(output)
        self._ended = len(self.record.served)
        for sequence, output in self.running.values():
            output.tokens += [0] * (sequence.generated - len(output.tokens))

    def ask(self, index: int, arrival_s: float, lengths: tuple[int, int], most: int, score: float) -> None:
        """Send a request; it may be refused."""
        self.run(arrival_s)
        try:
            promise = self.admission.admit([(lengths[0], most)], arrival_s)
        except ApiError:
            return
        hints = Hints(score=score, slack_s=promise.slack_s)
        sequence = Sequence(index, lengths[0], most, arrival_s, lengths[1], hints=hints)
        output = Output(Request(str(index), (1,) * lengths[0], most), due_s=promise.due_s)
        self.running[index] = sequence, output
        self.present.append(output)
        self.due_s[index] = math.inf if promise.long else arrival_s + self.bound_s
        self.replica.submit(sequence)


def served(order: Order, bound_s: float, count: int, rate: float = 10.0, seed: int = 2) -> tuple[int, Array]:
    """Serve requests of twice the rate that the engine sustains; the number of late ones, and latencies per token."""
    rng, workload = np.random.default_rng(seed), _SCHEDULE.workload
    arrivals = 100 + np.cumsum(rng.exponential(1 / rate, count))
    inputs, outputs = workload.input.sample(count, rng), workload.output.sample(count, rng)
    scores = noisy_scores([int(tokens) for tokens in outputs], TAU, seed)
    server = SimulatedServer(bound_s, order, count)
    for i, arrival_s in enumerate(arrivals.tolist()):
        server.ask(i, arrival_s, (int(inputs[i]), int(outputs[i])), workload.output.max, float(scores[i]))
    server.run()
    done = server.record.served
    assert not server.present and len(done) == len(server.due_s)
    late = sum(request.finish_s > server.due_s[request.index] for request in done)
    return late, np.array([(request.finish_s - request.arrival_s) / request.output_tokens for request in done])


def main() -> None:
    """Print the accepted and the late requests of each order."""
    orders = {
        "fcfs": make_order("fcfs"),
        "learned, as promised": Promised(make_order("learned")),
        "learned, without a limit": make_order("learned"),
    }
    print(f"{'bound':>6}  {'order':26} accepted  late  ms per token")
    for bound_s in (20.0, 40.0):
        for name, order in orders.items():
            late, per_token_s = served(order, bound_s, REQUESTS)
            print(f"{bound_s:5g}s  {name:26} {len(per_token_s):8,} {late:5,}  {per_token_s.mean() * 1e3:12.0f}")


if __name__ == "__main__":
    main()
