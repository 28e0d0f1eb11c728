"""Client of a plan's engines; records results."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Protocol

from xcore.errors import InputError
from xcore.requests.engine_protocol import Ended
from xcore.requests.request import Request, Result
from xcore.specs.request_times import RequestTimes
from xcore.tokenizer import load_tokenizer
from xrunner.core.results import ResultFile
from xserver.engines.engine_link import Output


class Takes(Protocol):
    """A link to an engine, or to one of several."""

    def add(self, request: Request) -> Output:
        """Give a request to an engine."""


class EngineClient:
    """Sends requests to a plan's engines and records the results. Times are seconds since its creation."""

    def __init__(
        self,
        links: Mapping[str, Takes],
        directories: Mapping[str, Path],
        file: ResultFile | None,
        progress: Callable[[int], None],
    ):
        """Set up the client; `directories` are all models' directories, by name."""
        self._links, self._file, self._progress = links, file, progress
        self._tokenizers = {name: load_tokenizer(directory) for name, directory in directories.items()} if file else {}
        self._zero_s = time.monotonic()
        self.served: dict[str, list[RequestTimes]] = {name: [] for name in directories}
        """Served requests of this run, by model, in order of completion."""
        self.results: dict[str, Result] = dict(file.done) if file else {}
        """Results by request id."""
        self.resumed = len(self.results)

    async def ask(self, model: str, request: Request) -> Result:
        """Return the result of a request that arrives now; if it was finished before this run, return immediately."""
        if request.id in self.results:
            return self.results[request.id]
        ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()

        def look() -> None:
            if asked.ended and not ended.done():
                ended.set_result(asked.ended)

        # the link uses numbers as ids; a run of a plan promises no times, so others may pass without a limit
        asked = self._links[model].add(replace(request, seed=request.own_seed, arrival_s=0.0, slack_s=inf))
        asked.listeners.append(look)
        look()  # an engine that has failed ends it at once
        end = await ended
        if end.reason == "error" and not end.error:
            raise InputError(
                f"Request '{request.id}' of model '{model}' can't be run: {end.refused or 'its engine has ended'}"
            )
        arrival_s, finish_s = asked.added_s - self._zero_s, asked.last_s - self._zero_s
        start_s, first_s = (None if s is None else s - self._zero_s for s in (asked.start_s, asked.first_s))
        count, tokens = len(request.prompt_ids), tuple(asked.tokens)
        times = arrival_s, start_s, first_s, finish_s
        result = Result(request.id, count, tokens, end.reason, *times, error=end.error)
        if end.error:
            result = replace(result, finish_s=self.now_s)
            self._keep(model, result)
            return result
        began_s, given_s = (arrival_s if s is None else s for s in (start_s, first_s))
        place = len(self.served[model])
        self.served[model].append(RequestTimes(place, count, len(tokens), arrival_s, began_s, given_s, finish_s))
        self._keep(model, result)
        return result

    def _keep(self, model: str, result: Result) -> None:
        self.results[result.id] = result
        self._progress(len(self.results))
        if self._file:
            tokenizer = self._tokenizers[model]
            text = tokenizer.decode(list(result.output_ids)) if tokenizer else None
            self._file.append(replace(result, text=text))

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._zero_s

    async def until(self, at_s: float) -> None:
        """Wait until a time of the run."""
        await asyncio.sleep(max(0.0, self._zero_s + at_s - time.monotonic()))


async def together(coroutines: Sequence[Coroutine[object, object, None]]) -> None:
    """Run all coroutines to completion; if one fails, cancel the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
