"""An application's calls on engines: each call is sent as soon as the calls that it reads have ended."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from xcore.document import to_dict
from xcore.requests.request import Result
from xcore.requests.requests import check_request
from xmulti.applications.planned_application import Ids, PlannedApplication
from xmulti.files.dependent_calls import Chain, DependentCalls
from xmulti.plans.engine_client import EngineClient, together


@dataclass(frozen=True)
class ApplicationCalls:
    """An application's calls on a plan's engines."""

    application: PlannedApplication
    in_turn: bool

    @property
    def total(self) -> int:
        """The number of calls; each round is a call."""
        return self.application.lengths().left

    @property
    def mark(self) -> object:
        """A value that is equal for the same application."""
        application = self.application
        own = {name: [list(map(list, rounds)) for rounds in calls] for name, calls in application.own.items()}
        instructions = {name: list(ids) for name, ids in application.instructions.items()}
        return [to_dict(application.graph), own, instructions, application.seed]

    def check(self) -> None:
        """Check that the calls whose prompts are known can be run.

        Raises:
            InputError: A call can't be run.
        """
        calls = self.application.calls(self.in_turn)
        for chain in calls.begin():
            check_request(
                self.application.request(chain, calls.prompt(chain)),
                self.application.models[chain.node.name].schedule.model.spec,
                skippable=False,
            )

    def ended(self, results: Mapping[str, Result]) -> list[str]:
        """Return the nodes all of whose calls have one of these results."""
        calls = self.application.calls(self.in_turn)
        waiting = calls.begin()
        while waiting:
            chain = waiting.pop()
            if chain.name in results:
                waiting += calls.end(chain, _read(results[chain.name]))
        return [name for name, left in calls.left_of.items() if not left]

    async def run(self, asking: EngineClient, on_ended: Callable[[str], object] = lambda node: None) -> None:
        """Send each call as soon as its inputs are available; `on_ended` is called with a node after its last call."""
        calls = self.application.calls(self.in_turn)
        await self._begin(calls, calls.begin(), asking, on_ended)

    async def _begin(
        self,
        calls: DependentCalls[Ids],
        chains: Sequence[Chain[Ids]],
        asking: EngineClient,
        on_ended: Callable[[str], object],
    ) -> None:
        async def one(chain: Chain[Ids]) -> None:
            request = self.application.request(chain, calls.prompt(chain))
            result = await asking.ask(self.application.models[chain.node.name].name, request)
            following = calls.end(chain, _read(result))
            if not calls.left_of[chain.node.name]:
                on_ended(chain.node.name)
            await self._begin(calls, following, asking, on_ended)

        await together([one(chain) for chain in chains])


def _read(result: Result) -> Ids:
    """Return the part of an output that other calls read.

    The end token is left out, since it has no meaning within another prompt.
    """
    return result.output_ids[:-1] if result.finish_reason == "stop" else result.output_ids
