"""TokenizerQueue: prepares requests in a thread, one after the other, and predicts how long one waits for its turn."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_WEIGHT = 0.1
"""Weight of the latest measurement in the running means."""
_LONG = 4096
"""From so many characters on, the time of a request depends on them; otherwise on its grammar, or its sequences."""


class TokenizerQueue:
    """The requests whose texts are being tokenized, or wait for it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self._character_s, self._request_s = 1e-6, 0.0
        self._characters = 0
        self.length = 0
        """The number of these requests."""

    @property
    def wait_s(self) -> float:
        """The predicted seconds until the last request in the queue is tokenized."""
        return self._characters * self._character_s + self.length * self._request_s

    async def run(self, characters: int, prepare: Callable[[], None]) -> None:
        """Run `prepare`, which tokenizes `characters` characters, after all earlier requests."""

        def timed() -> float:
            began_s = time.perf_counter()
            prepare()
            return time.perf_counter() - began_s

        self._characters += characters
        self.length += 1
        try:
            took_s = await asyncio.get_running_loop().run_in_executor(self._thread, timed)
        finally:
            self._characters -= characters
            self.length -= 1
        if characters < _LONG:
            self._request_s += _WEIGHT * (took_s - self._request_s)
        else:
            self._character_s += _WEIGHT * (took_s / characters - self._character_s)
