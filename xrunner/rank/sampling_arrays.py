"""Sampling arrays: how the tokens of a batch are sampled, from its requests to the arrays of a `DeviceBatch`."""

from collections.abc import Mapping, Sequence

import numpy as np

from xcore.arrays import Floats32, Integers, Integers32, Numbers
from xrunner.rank.running import RunningRequest

Arrays = tuple[Numbers, ...]
PromptRows = tuple[Integers, Integers, Integers, int]
"""Rows of a batch and the tokens after them.

Rows, int64 [n]; the tokens after them, [n]; these tokens' sequences (by index) and places, [2, n]; and the
number of likeliest tokens that each gets.
"""


def sampling_arrays(
    receivers: Sequence[RunningRequest], sampled: Mapping[int, int]
) -> tuple[Arrays | None, Arrays | None]:
    """Return the arrays of a `Sampling` and those of its edits; None and None if all requests are greedy.

    The first are in order, without `seen`. Then come the slots of the sampling state to clear, int64 [n],
    and the slots and tokens to enter there, int64 [2, n]. `sampled` as in `Assembler`.
    """
    if all(receiver.greedy for receiver in receivers):
        return None, None
    temperature, top_k, top_p, penalty, seed, min_p, edited = zip(*(r.sampling for r in receivers), strict=True)
    entries = _Entries()
    for receiver in receivers:
        if receiver.penalised:
            entries.enter(receiver)
    made = [len(r.output) + (r.sequence.index in sampled) for r in receivers]
    penalties = np.array(penalty, dtype=np.float32)
    edits = edit_arrays(receivers, made, penalties, entries) if any(edited) else None
    return (
        np.array(temperature, dtype=np.float32),
        np.array(top_k, dtype=np.int32),
        np.array(top_p, dtype=np.float32),
        penalties,
        np.array(seed, dtype=np.int64),
        np.array([len(r.prompt) + count for r, count in zip(receivers, made, strict=True)], dtype=np.int64),
        np.array([receiver.slot or 0 for receiver in receivers], dtype=np.int64),
        _log(min_p) if any(min_p) else np.zeros(0, dtype=np.float32),
        np.array(entries.cleared, dtype=np.int64),
        np.array([entries.slots, entries.tokens], dtype=np.int64),
    ), edits


def logprob_rows(receivers: Sequence[RunningRequest]) -> tuple[Integers, int] | None:
    """Return the rows of requests that ask for log-probabilities, int64 [n], and the most that one of them asks for.

    Return None if no request asks. Ended requests count too, because their results are read by the same rule.
    """
    asked = [(row, r.logprobs_asked) for row, r in enumerate(receivers) if r.logprobs_asked is not None]
    return (np.array([row for row, _ in asked], dtype=np.int64), max(most for _, most in asked)) if asked else None


def prompt_logprob_rows(encode: Sequence[tuple[RunningRequest, int]]) -> PromptRows | None:
    """Return the prompt tokens whose log-probabilities a micro-batch computes; None if no request asks.

    `encode` are its prompts and the number of tokens that each computes. The tokens are marked as ordered: when a
    preempted prompt is computed again, they aren't ordered again.
    """
    places: list[tuple[int, int, int, int]] = []
    offset, most = 0, 0
    for running, count in encode:
        if running.request.prompt_logprobs:
            begin, last = running.sequence.cached, len(running.prompt) - 1
            asked = range(max(running.prompt_ordered, begin + 1), min(begin + count, last) + 1)
            tokens = running.request.prompt_ids
            places += [(offset + at - 1 - begin, tokens[at], running.sequence.index, at) for at in asked]
            running.prompt_ordered = max(running.prompt_ordered, asked.stop)
            most = max(most, running.logprobs_asked or 0)
        offset += count
    if not places:
        return None
    rows, tokens, *where = np.array(places, dtype=np.int64).T.copy()
    return rows, tokens, np.array(where), most


def edit_arrays(
    receivers: Sequence[RunningRequest], made: Sequence[int], penalties: Floats32, entries: "_Entries"
) -> Arrays | None:
    """Return the arrays of `LogitEdits`; None if no row is edited.

    They are in order, without `seen` and `counts`. Then come the slots of the counts to clear, int64 [n], and the slots
    and tokens to count there, int64 [2, n]. `made` is the number of output tokens of each row. The repetition penalties
    of edited rows are moved out of `penalties`, float32 [rows].
    """
    masks: list[Integers32] = []
    mask_of: dict[int, int] = {}
    biases: list[tuple[int, int, float]] = []
    rows = []
    for row, (receiver, count) in enumerate(zip(receivers, made, strict=True)):
        request = receiver.request
        if receiver.ended or not request.edited:
            continue
        mask = receiver.mask(count)
        if mask is not None:
            mask_of[row] = len(masks)
            masks.append(mask)
        elif not receiver.counted and not request.logit_bias:
            continue
        rows.append(row)
        biases += [(row, token, bias) for token, bias in request.logit_bias]
    if not rows:
        return None
    places = np.array(rows, dtype=np.int64)
    repetition = penalties[places]
    penalties[places] = 1
    edited = [receivers[row] for row in rows]
    return (
        places,
        repetition,
        np.array([r.request.frequency_penalty for r in edited], dtype=np.float32),
        np.array([r.request.presence_penalty for r in edited], dtype=np.float32),
        np.array([r.slot or 0 for r in edited], dtype=np.int64),
        np.array([mask_of.get(row, -1) for row in rows], dtype=np.int64),
        np.stack(masks) if masks else np.zeros((0, 1), dtype=np.int32),
        np.array([[row for row, *_ in biases], [token for _, token, _ in biases]], dtype=np.int64),
        np.array([bias for *_, bias in biases], dtype=np.float32),
        np.array(entries.uncounted, dtype=np.int64),
        np.array([entries.counted_slots, entries.counted], dtype=np.int64),
    )


class _Entries:
    """The new entries of the sampling state."""

    def __init__(self) -> None:
        self.cleared: list[int] = []
        """Slots whose sequences begin."""
        self.slots: list[int] = []
        self.tokens: list[int] = []
        """Tokens of prompts and outputs, with their slots."""
        self.uncounted: list[int] = []
        """Slots whose counted sequences begin."""
        self.counted_slots: list[int] = []
        self.counted: list[int] = []
        """Tokens of outputs that are counted, with their slots."""

    def enter(self, receiver: RunningRequest) -> None:
        """Add the tokens of a sequence with a penalty that the state lacks."""
        slot = receiver.slot
        if slot is None:
            assert receiver.ended, "a sequence with a penalty has a slot"
            return
        begins = not receiver.entered
        prompt, output = receiver.enter()
        if receiver.request.repetition_penalty != 1:
            tokens = [*prompt, *output] if prompt else output
            self.slots += [slot] * len(tokens)
            self.tokens += tokens
            if begins:
                self.cleared.append(slot)
        if receiver.counted:
            self.counted_slots += [slot] * len(output)
            self.counted += output
            if begins:
                self.uncounted.append(slot)


def _log(shares: Sequence[float]) -> Floats32:
    """Return the logarithms of shares, -inf for 0: float32 [shares]."""
    with np.errstate(divide="ignore"):
        return np.log(np.array(shares, dtype=np.float64)).astype(np.float32)
