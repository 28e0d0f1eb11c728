"""Outputs: the requests of one driver, and the tokens that have been sampled for them.

Tokens come later than the ledger books them. When a stop token arrives, a later iteration of its sequence may already
be booked or computing. Results for a request that has ended are ignored.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import torch

from exegpt.kernels.argmax import NO_TOKEN
from xcore.arrays import Array
from xcore.batching import Sequence
from xcore.batching.sequence import PREEMPTED
from xcore.requests.engine_protocol import Event, TokenEvent
from xcore.requests.grammar import Grammars
from xcore.requests.request import NO_GRAMMAR, FinishReason, Request, Result
from xcore.specs.request_times import RequestTimes
from xrunner.core.drift import LengthDrift
from xrunner.rank.running import RunningRequest
from xrunner.rank.sampling_arrays import PromptRows
from xrunner.rank.sampling_state import Slots
from xrunner.rank.token_mask import mask_without

_KEPT = 256
"""Minimum number of ended requests that are kept: dropping them goes through all."""

_NO_TOKEN = "the model's logits are NaN or have overflowed, or rule out every token"
_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks; as in vLLM."""


class Outputs:
    """The requests and outputs of one driver.

    `eos` are the model's stop tokens, `vocab` the number of its tokens, `grammars` those of its requests. `emit` gets
    every result and, with `stream`, every token as it comes. With `record`, the times of finished requests are kept in
    `served`. `keyed` is a block size: sequences get a key for each full block of tokens, by which a prefix is found
    again.
    """

    def __init__(
        self,
        eos: frozenset[int],
        vocab: int,
        grammars: Grammars,
        emit: Callable[[Event], None],
        stream: bool,
        record: bool,
        keyed: int | None = None,
    ):
        self.running: dict[int, RunningRequest] = {}
        """Requests by their places; ended ones are dropped later."""
        self.served: list[RequestTimes] = []
        self.drift: LengthDrift | None = None
        """The drift of these requests' lengths."""
        self._eos, self._vocab, self._grammars = eos, vocab, grammars
        self._emit, self._stream, self._record, self._keyed = emit, stream, record, keyed
        self._slots = Slots()
        self._stopped: list[Sequence] = []
        self._failed: list[Sequence] = []

    def add(self, index: int, request: Request, start: tuple[int, ...]) -> Sequence:
        """Create a request with its unique place and the start of its output, and return its sequence."""
        prompt = np.array(request.prompt_ids, dtype=np.int64)
        sequence = Sequence(index, len(prompt), request.max_tokens, request.arrival_s)
        running = self.running[index] = RunningRequest(request, sequence, prompt, start=start)
        running.constraint = self._grammars.start(request)
        if request.output_ids:
            self._resume(running)
        if request.min_tokens:
            running.without_stops = mask_without({*self._eos, *request.stop_token_ids}, self._vocab)
        if self._keyed and not request.prompt_logprobs:  # a prefix from the cache has no logits
            sequence.keys = running.keys
            running.extend_keys(self._keyed)
        return sequence

    def _resume(self, running: RunningRequest) -> None:
        """Continue a request that another engine had begun, as after a preemption."""
        running.output = list(running.request.output_ids)
        running.sequence.generated = len(running.output)
        running.sequence.recompute(bool(running.start))
        if running.constraint:
            for token in running.output:
                running.constraint.consume(token)

    def of(self, sequences: Iterable[Sequence]) -> list[RunningRequest]:
        """Return the requests of these sequences."""
        return [self.running[sequence.index] for sequence in sequences]

    def begin(self, request: RunningRequest, now: float) -> None:
        """Record that a request's prefill begins, unless it had begun."""
        if request.start_s is None:
            request.start_s = now
            if request.penalised:
                request.slot = self._slots.allocate()
            if self.drift:
                self.drift.begin(request.sequence.index)

    def give(self, receivers: list[RunningRequest], result: torch.Tensor, prompts: PromptRows | None = None) -> None:
        """Give the tokens of a micro-batch to their requests, with the log-probabilities of their `prompts`.

        Requests that end by their tokens are reported.
        """
        moment, tokens, logprobs = _read_result(result, len(receivers))
        if prompts is not None:
            logprobs = self._enter_prompts(prompts, logprobs, moment)
        for receiver, token in zip(receivers, tokens, strict=True):
            if token == NO_TOKEN and not receiver.ended:
                self._fail(receiver, _NO_TOKEN, moment)
        if len(logprobs):
            _enter_logprobs(receivers, logprobs)
        for receiver, token in zip(receivers, tokens, strict=True):
            if receiver.ended:
                continue
            receiver.output.append(token)
            if self._keyed:
                receiver.extend_keys(self._keyed)
            if self._stream:
                self._emit(_token(receiver, token, moment))
            if receiver.first_token_s is None:
                receiver.first_token_s = moment
            if receiver.sequence.status is PREEMPTED and not receiver.lacks_output:
                receiver.sequence.last_token_s = 0.0
            if self._stops(receiver, token):
                if receiver.constraint is not None and receiver.constraint.failed:
                    self._fail(receiver, NO_GRAMMAR, moment)
                else:
                    self._stopped.append(receiver.sequence)
                    self._end(receiver, "stop", moment, len(receiver.output))
            elif len(receiver.output) == receiver.request.max_tokens:
                self._end(receiver, "length", moment, len(receiver.output))

    def cancel(self, request: RunningRequest, now: float, output_tokens: int | None = None) -> None:
        """End an aborted request; `output_tokens` is the length of a complete output."""
        self._end(request, "cancelled", now, output_tokens)

    def take_stopped(self) -> list[Sequence]:
        """Return the sequences that a stop token ended since the last call."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def take_failed(self) -> list[Sequence]:
        """Return the sequences that ended in an error since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def forget(self, alive: Iterable[Sequence], count: int) -> None:
        """Drop ended requests once they outnumber the `count` requests of the sequences that are `alive`."""
        if len(self.running) <= 2 * count + _KEPT:
            return
        kept = {sequence.index for sequence in alive}
        for index in [index for index in self.running if index not in kept]:
            del self.running[index]

    def _enter_prompts(self, prompts: PromptRows, values: Array, moment: float) -> Array:
        """Append prompts' log-probabilities, the last ones in `values`, to their requests; return the values before.

        A request fails if one of its log-probabilities is NaN.
        """
        *_, (indices, places), most = prompts
        begin = len(values) - len(indices) * (1 + 2 * most)
        rows = values[begin:].reshape(len(indices), -1).tolist()
        for index, place, row in zip(indices.tolist(), places.tolist(), rows, strict=True):
            running = self.running.get(index)
            if running is None or running.ended:
                continue
            assert place == len(running.prompt_logprobs), "log-probabilities of a prompt come in order"
            if not row[0] < np.inf:
                self._fail(running, _NO_TOKEN, moment)
                continue
            running.prompt_logprobs.append(_read_logprobs(row, running.logprobs_asked or 0))
        return values[:begin]

    def _stops(self, receiver: RunningRequest, token: int) -> bool:
        """Return whether a token ends an output. A grammar consumes the token."""
        request, constraint = receiver.request, receiver.constraint
        if constraint is not None:
            constraint.consume(token)
            if constraint.complete:
                return True
        return (token in self._eos and not request.ignore_eos) or token in request.stop_token_ids

    def _fail(self, running: RunningRequest, error: str, moment: float) -> None:
        """End one request by an error; no other request reuses its blocks."""
        self._failed.append(running.sequence)
        self._end(running, "error", moment, None, error)

    def _end(
        self,
        running: RunningRequest,
        reason: FinishReason,
        moment: float,
        output_tokens: int | None,
        error: str | None = None,
    ) -> None:
        """End a request; `output_tokens` is the length of a complete output, else None."""
        running.ended = True
        if running.slot is not None:
            self._slots.free(running.slot)
            running.slot = None
        request, tokens = running.request, tuple(running.output)
        if self.drift and running.start_s is not None:
            self.drift.end(running.sequence.index, len(request.prompt_ids), output_tokens)
        start, first = running.start_s, running.first_token_s
        result = Result(
            request.id, len(request.prompt_ids), tokens, reason, request.arrival_s, start, first, moment, error
        )
        if self._record and reason in ("stop", "length"):
            assert start is not None and first is not None, "a finished request has begun"
            times = request.arrival_s, start, first, moment
            self.served.append(RequestTimes(running.sequence.index, len(request.prompt_ids), len(tokens), *times))
        if request.logprobs is not None:
            own, likeliest = zip(*running.logprobs, strict=True) if running.logprobs else ((), ())
            result = replace(result, logprobs=own, likeliest=likeliest)
        if request.prompt_logprobs:
            values, likeliest = zip(*running.prompt_logprobs, strict=True)
            result = replace(result, prompt_logprobs=values, prompt_likeliest=likeliest)
        self._emit(result)


def _read_result(result: torch.Tensor, count: int) -> tuple[float, list[int], Array]:
    """Return the time of a batch's end, its `count` tokens, and the `log_probs` of tokens and prompts, flat.

    `result` is the tensor that `Worker.run` returned.
    """
    array = result.numpy()
    return float(array[:1].view(np.float64)[0]), array[1 : 1 + count].tolist(), array[1 + count :].view(np.float64)


def _token(receiver: RunningRequest, token: int, moment: float) -> TokenEvent:
    """Return the latest token as an event."""
    index, request = len(receiver.output) - 1, receiver.request
    logprob = receiver.logprobs[-1] if receiver.logprobs else None
    prompt = tuple(receiver.prompt_logprobs) if request.prompt_logprobs and index == 0 else ()
    start_s, cached = (None, 0) if index else (receiver.start_s, receiver.sequence.hit)
    return TokenEvent(request.id, index, token, moment, logprob, start_s, prompt, cached)


def _enter_logprobs(receivers: list[RunningRequest], values: Array) -> None:
    """Append the flat result of `log_probs` to the unfinished requests that asked for it."""
    asked = [receiver for receiver in receivers if receiver.logprobs_asked is not None]
    for receiver, row in zip(asked, values.reshape(len(asked), -1).tolist(), strict=True):
        if not receiver.ended:
            receiver.logprobs.append(_read_logprobs(row, receiver.logprobs_asked or 0))


def _read_logprobs(row: list[float], most: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return the log-probability of a token and of up to `most` likeliest tokens, from a row of `log_probs`.

    Tokens that are ruled out get `_LEAST_LOGPROB`.
    """
    own, *best = (max(value, _LEAST_LOGPROB) for value in row)
    count = len(best) // 2
    return own, tuple(itertools.islice(zip(map(int, best[count:]), best[:count], strict=True), most))
