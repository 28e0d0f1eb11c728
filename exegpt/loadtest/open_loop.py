"""The open loop: send every request when it arrives, whether or not earlier ones have been answered."""

import asyncio
import contextlib
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from exegpt.loadtest.connection import Address, ConnectionPool, ExchangeError
from exegpt.loadtest.request_outcome import NO_DONE, REJECTED, RequestOutcome
from exegpt.loadtest.response import Stream
from xcore.frozen_heap import frozen_heap
from xcore.usable_cpus import usable_cpus


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request, ready to be sent."""

    index: int
    data: bytes
    """The whole HTTP request."""
    prompt_tokens: int
    output_tokens: int
    arrival_s: float
    cut_at: int | None
    """The client disconnects after this many tokens; None: it waits for the end."""


@dataclass(frozen=True)
class SendLimits:
    """The limits for sending requests."""

    timeout_s: float | None
    """Time limit of one attempt; None: no limit."""
    retries: int
    """Maximum number of waits for an overloaded server's Retry-After."""
    max_concurrency: int | None


@dataclass(frozen=True)
class Sent:
    """The outcomes of a run."""

    outcomes: tuple[RequestOutcome, ...]
    """The outcomes in the order of the requests."""
    cpu_share: float
    """Share of all cores' time that this process used."""
    cores: int
    connections: int

    @property
    def has_done(self) -> bool:
        """Whether a stream ended with [DONE]."""
        return any(outcome.done for outcome in self.outcomes)

    def requiring_done(self) -> "Sent":
        """Return this run with answers that ended without [DONE] as failed.

        Their endpoint ends other streams with [DONE].
        """
        why = "the stream ended without [DONE]"
        outcomes = (replace(o, error=NO_DONE, message=why) if o.ok and o.done is False else o for o in self.outcomes)
        return replace(self, outcomes=tuple(outcomes))


async def send_all(address: Address, requests: Sequence[LoadRequest], sending: SendLimits) -> Sent:
    """Send the requests at their arrivals and wait for all of them."""
    pool, cores = ConnectionPool(address), usable_cpus()
    _allow_connections()
    gc.collect()
    loop, busy = asyncio.get_running_loop(), time.process_time()
    start = loop.time()
    sender = _Sender(pool, sending, start)
    running = []
    with frozen_heap():
        for request in requests:
            # Yield to the event loop even if the request is late: answers must be read in the meantime.
            await asyncio.sleep(max(0.0, start + request.arrival_s - loop.time()))
            running.append(asyncio.create_task(sender.send(request)))
        outcomes = await asyncio.gather(*running)
    share = (time.process_time() - busy) / (max(loop.time() - start, 1e-9) * cores)
    pool.close()
    return Sent(tuple(outcomes), share, cores, pool.connections)


class _Sender:
    """Sends the requests of a run that began at `start`, on the event loop's clock."""

    def __init__(self, pool: ConnectionPool, sending: SendLimits, start: float):
        self._pool, self._sending, self._start = pool, sending, start
        most = sending.max_concurrency
        self._longest_s = sys.float_info.max if sending.timeout_s is None else sending.timeout_s
        """Longest wait before another attempt."""
        self._running = asyncio.Semaphore(most) if most else None
        self._now = asyncio.get_running_loop().time

    async def send(self, request: LoadRequest) -> RequestOutcome:
        """Run one request from its arrival to its end."""
        held_back = self._running is not None and self._running.locked()
        async with self._running or contextlib.nullcontext():
            taken_up = self._now()
            due = taken_up if held_back else self._start + request.arrival_s
            sent, stream, failure, retries = taken_up, Stream(request.cut_at), None, 0
            while True:
                failure = await self._attempt(request, stream)
                wait_s = stream.retry_after_s
                if wait_s is not None and wait_s > self._longest_s:
                    failure = "retry_after", f"the server asks to wait {wait_s:.3g} s, longer than the time limit"
                    break
                if wait_s is None or retries == self._sending.retries:
                    break
                retries += 1
                await asyncio.sleep(wait_s)
                sent, stream = self._now(), Stream(request.cut_at)
        return self._outcome(request, stream, failure, (due, taken_up, sent), retries)

    async def _attempt(self, request: LoadRequest, stream: Stream) -> tuple[str, str] | None:
        """Make one attempt; return kind and message of an error, or None."""
        try:
            await self._pool.exchange(request.data, stream, self._sending.timeout_s)
        except ExchangeError as error:
            if not (stream.done and error.kind == "timeout"):  # after [DONE], the server only left the connection open
                return stream.error or (error.kind, str(error))
        return (REJECTED, stream.message) if stream.status == 429 else stream.failure

    def _outcome(
        self,
        request: LoadRequest,
        stream: Stream,
        failure: tuple[str, str] | None,
        times: tuple[float, float, float],
        retries: int,
    ) -> RequestOutcome:
        start, (due, taken_up, sent) = self._start, times
        first = stream.first_token
        finish = self._now() if failure or stream.last is None else stream.last
        kind, message = failure or (None, None)
        return RequestOutcome(
            index=request.index,
            prompt_tokens=stream.prompt_tokens or request.prompt_tokens,
            asked_tokens=request.output_tokens,
            output_tokens=stream.tokens,
            scheduled_s=request.arrival_s,
            due_s=due - start,
            sent_s=sent - start,
            lag_s=taken_up - due,
            first_token_s=None if first is None else first - start,
            finish_s=finish - start,
            status=stream.status,
            finish_reason="cut" if stream.enough() and stream.finish_reason is None else stream.finish_reason,
            error=kind,
            message=message,
            retries=retries,
            chunks=stream.chunks,
            done=None if stream.enough() and not stream.done else stream.done,
            last_token_s=None if stream.last_token is None else stream.last_token - start,
        )


def _allow_connections() -> None:
    """Raise the limit of open files to this process's maximum: every connection is an open file."""
    try:
        import resource
    except ImportError:  # not on Windows, where there is no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
