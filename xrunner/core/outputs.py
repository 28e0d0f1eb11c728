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
from xcore.batching import Sequence
from xcore.batching.sequence import PREEMPTED
from xcore.requests.grammar import Grammars
from xcore.requests.request import FinishReason, Request, Result
from xcore.specs.request_times import RequestTimes
from xrunner.core.drift import Drift
from xrunner.core.events import Event, Token
from xrunner.rank.running import Running
from xrunner.rank.sampling_arrays import PromptRows
from xrunner.rank.sampling_state import Slots
from xrunner.rank.token_mask import mask_without
from xrunner.rank.worker import read_result

_KEPT = 256
"""Minimum number of ended requests that are kept: dropping them goes through all."""

_NO_TOKEN = "the model's logits are NaN or have overflowed, or rule out every token"
_NO_GRAMMAR = "the grammar can't be followed any further"
_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks; as in vLLM."""


class Outputs:
    """The requests and outputs of one driver.

    `eos` are the model's stop tokens, `vocab` the number of its tokens, `grammars` those of its requests.
    `emit` gets every result and, with `stream`, every token as it comes.
    With `record`, the times of finished requests are kept in `served`. `keyed` is a block size: as their tokens come,
    sequences get a key for each full block, by which a prefix is found again.
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
        self.running: dict[int, Running] = {}
        """Requests by their places; ended ones are dropped later."""
        self.served: list[RequestTimes] = []
        self.drift: Drift | None = None
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
        running = self.running[index] = Running(request, sequence, prompt, start=start)
        running.constraint = self._grammars.start(request)
        if request.output_ids:
            self._resume(running)
        if request.min_tokens:
            running.without_stops = mask_without({*self._eos, *request.stop_token_ids}, self._vocab)
        if self._keyed and not request.prompt_logprobs:  # a prefix from the cache has no logits
            sequence.keys = running.keys
            running.extend_keys(self._keyed)
        return sequence

    def _resume(self, running: Running) -> None:
        """Continue a request where another engine left it, as after a preemption."""
        running.output = list(running.request.output_ids)
        running.sequence.generated = len(running.output)
        running.sequence.recompute(bool(running.start))
        if running.constraint:
            for token in running.output:
                running.constraint.consume(token)

    def of(self, sequences: Iterable[Sequence]) -> list[Running]:
        """Return the requests of these sequences."""
        return [self.running[sequence.index] for sequence in sequences]

    def begin(self, request: Running, now: float) -> None:
        """Record that a request's prefill begins, unless it had begun."""
        if request.start_s is None:
            request.start_s = now
            if request.penalised:
                request.slot = self._slots.allocate()
            if self.drift:
                self.drift.begin(request.sequence.index)

    def give(self, receivers: list[Running], result: torch.Tensor, prompts: PromptRows | None = None) -> None:
        """Give the tokens of a micro-batch to their requests, with the log-probabilities of their `prompts`.

        Requests that end by their tokens are reported.
        """
        moment, tokens, logprobs = read_result(result, len(receivers))
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
                receiver.sequence.ready_s = 0.0
            if self._stops(receiver, token):
                if receiver.constraint is not None and receiver.constraint.failed:
                    self._fail(receiver, _NO_GRAMMAR, moment)
                else:
                    self._stopped.append(receiver.sequence)
                    self._finish(receiver, "stop", moment)
            elif len(receiver.output) == receiver.request.max_tokens:
                self._finish(receiver, "length", moment)

    def cancel(self, request: Running, now: float, output_tokens: int | None = None) -> None:
        """End an aborted request; `output_tokens` is the length of an output that is complete all the same."""
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

    def _enter_prompts(self, prompts: PromptRows, values: np.ndarray, moment: float) -> np.ndarray:
        """Append prompts' log-probabilities, the last ones in `values`, to their requests; return the values before.

        A request fails where one of its log-probabilities is NaN.
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
            own, likeliest = _read_logprobs(row, running.logprobs_asked or 0)
            running.prompt_logprobs.append(own)
            running.prompt_likeliest.append(likeliest)
        return values[:begin]

    def _stops(self, receiver: Running, token: int) -> bool:
        """Return whether a token ends an output. A grammar consumes the token."""
        request, constraint = receiver.request, receiver.constraint
        if constraint is not None:
            constraint.consume(token)
            if constraint.complete:
                return True
        return (token in self._eos and not request.ignore_eos) or token in request.stop_token_ids

    def _fail(self, running: Running, error: str, moment: float) -> None:
        """End one request by an error; no other request reuses its blocks."""
        self._failed.append(running.sequence)
        self._end(running, "error", moment, None, error)

    def _finish(self, running: Running, reason: FinishReason, moment: float) -> None:
        start, first = running.start_s, running.first_token_s
        assert start is not None and first is not None, "a finished request has begun"
        if self._record:
            request, sequence, tokens = running.request, running.sequence, len(running.output)
            times = request.arrival_s, start, first, moment
            self.served.append(RequestTimes(sequence.index, sequence.input_tokens, tokens, *times))
        self._end(running, reason, moment, len(running.output))

    def _end(
        self,
        running: Running,
        reason: FinishReason,
        moment: float,
        output_tokens: int | None,
        error: str | None = None,
    ) -> None:
        running.ended = True
        if running.slot is not None:
            self._slots.free(running.slot)
            running.slot = None
        request, tokens = running.request, tuple(running.output)
        if self.drift and running.start_s is not None:
            self.drift.end(running.sequence.index, len(request.prompt_ids), output_tokens)
        times = request.arrival_s, running.start_s, running.first_token_s, moment
        result = Result(request.id, len(request.prompt_ids), tokens, reason, *times, error=error)
        if request.logprobs is not None:
            result = replace(result, logprobs=tuple(running.logprobs), likeliest=tuple(running.likeliest))
        if request.prompt_logprobs:
            values, likeliest = tuple(running.prompt_logprobs), tuple(running.prompt_likeliest)
            result = replace(result, prompt_logprobs=values, prompt_likeliest=likeliest)
        self._emit(result)


def _token(receiver: Running, token: int, moment: float) -> Token:
    """Return the latest token as an event."""
    index, own, likeliest, prompt = len(receiver.output) - 1, None, (), ()
    if receiver.logprobs:
        own, likeliest = receiver.logprobs[-1], receiver.likeliest[-1]
    if receiver.request.prompt_logprobs and index == 0:
        prompt = tuple(zip(receiver.prompt_logprobs, receiver.prompt_likeliest, strict=True))
    start_s = None if index else receiver.start_s
    return Token(receiver.request.id, index, token, moment, own, likeliest, start_s, prompt)


def _enter_logprobs(receivers: list[Running], values: np.ndarray) -> None:
    """Append the flat result of `log_probs` to the unfinished requests that asked for it."""
    asked = [receiver for receiver in receivers if receiver.logprobs_asked is not None]
    for receiver, row in zip(asked, values.reshape(len(asked), -1).tolist(), strict=True):
        if not receiver.ended:
            own, likeliest = _read_logprobs(row, receiver.logprobs_asked or 0)
            receiver.logprobs.append(own)
            receiver.likeliest.append(likeliest)


def _read_logprobs(row: list[float], most: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return a token's log-probability and up to `most` likeliest tokens with theirs, from a row of `log_probs`.

    Tokens that are ruled out get `_LEAST_LOGPROB`.
    """
    own, *best = (max(value, _LEAST_LOGPROB) for value in row)
    count = len(best) // 2
    return own, tuple(itertools.islice(zip(map(int, best[count:]), best[:count], strict=True), most))
