"""An application's calls through a plan: each begins when the calls that it reads have ended, on any engine."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

from xcore.batching import Sequence
from xcore.specs.cluster_plan import Plan
from xcore.specs.request_times import RequestTimes
from xmulti.files.dependent_calls import Chain, DependentCalls
from xmulti.sharing.plan_engines import PlanEngines, ProfileOf


@dataclass(frozen=True)
class CallReplay:
    """The results of the calls."""

    served: dict[str, tuple[RequestTimes, ...]]
    """By model, in order of completion."""
    finish_s: dict[str, float]
    """By call: when it ended."""

    @property
    def seconds(self) -> float:
        """Seconds until the last call has ended."""
        return max(self.finish_s.values(), default=0.0)


def replay_calls(
    plan: Plan,
    profile_of: ProfileOf,
    calls: DependentCalls[int],
    model_of: Mapping[str, str],
    output_of: Callable[[Chain[int], int], int],
) -> CallReplay:
    """Run all calls through a plan.

    `model_of` maps each node to the plan's model. `output_of` returns the output tokens of a call, given its prompt's
    tokens.

    Raises:
        InputError: A model's cache could not hold a call.
    """
    engines = PlanEngines(plan.units, profile_of, calls.left)
    count = dict.fromkeys(engines.served, 0)
    finish_s: dict[str, float] = {}
    running: dict[tuple[str, int], Chain[int]] = {}

    def begin(chains: Items[Chain[int]], now: float) -> None:
        for chain in chains:
            name, prompt = model_of[chain.node.name], calls.prompt(chain)
            engines.dispatcher.submit(name, Sequence(count[name], prompt, output_of(chain, prompt), now))
            running[name, count[name]] = chain
            count[name] += 1

    begin(calls.begin(), 0.0)
    for _, answers in engines.run():
        for name, served in answers:
            chain = running.pop((name, served.index))
            finish_s[chain.name] = served.finish_s
            begin(calls.end(chain, served.output_tokens), served.finish_s)
    return CallReplay({name: engines.in_order(name) for name in count if count[name]}, finish_s)
