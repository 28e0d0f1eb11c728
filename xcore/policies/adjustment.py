"""Dynamic adjustment (paper section 5.2; docs/theory.md): batches that cost what the schedule predicts.

A batch's encoding time varies with the sum of its inputs, and the decoding batch with the number of sequences that end.
The next batch takes as many sequences as the decoding batch lacks. They are chosen from the front of the queue so that
the sum of their inputs is near its mean.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence as Items

from xcore.batching import Sequence

USUAL_SHARE = 0.05
"""The default of `--adjust`."""
PEEKED_BATCHES = 4
"""Batches at the front of the queue from which the next one is picked."""
MOST_BATCHES = 2
"""Most sequences of an adjusted batch, as a multiple of B_E."""
MOST_PASSED_OVER = 4
"""How often later requests may be encoded before a waiting one."""
_COUNT_WEIGHS = 3
"""A batch's sequences weigh a third of its tokens: with equal weights, tokens would vary more, with none, B_D."""
_LIFETIMES = 8
"""Lifetimes of a sequence over which the mean number of residents is taken."""

Prompt = tuple[int, int]
"""A candidate's tokens, and its place in the queue."""


def fewest_chosen(encode_batch: int) -> int:
    """Return the number of candidates up to which all are chosen, whatever their lengths: a quarter of B_E."""
    return (encode_batch + 3) // 4


class Adjustment:
    """Chooses the sequences to encode next: about B_E of them, with about B_E mean inputs.

    `share` is the share of B_E by which the tokens, and the residents, may deviate without a correction.
    """

    def __init__(self, share: float, input_mean: float, encode_batch: int, decode_batch: int, encode_stages: int = 0):
        """Create it with the schedule's B_E and B_D.

        `encode_stages` stages only encode; then the batches on all of them but one have joined the residents already.
        """
        self.share, self.encode_batch = share, encode_batch
        self.tokens = input_mean * encode_batch
        """Expected tokens of a batch."""
        self.weight = input_mean / _COUNT_WEIGHS
        """Tokens that weigh as much as a sequence too many."""
        self.level = float(decode_batch + (encode_stages - 1) * encode_batch)
        """Expected residents when a batch is chosen: at first the schedule's, later a mean of the observed ones."""
        self.follows = min(1.0, encode_batch / (_LIFETIMES * decode_batch))
        """Share of the way by which the level follows the residents at each batch."""
        self.fewest, self.most = fewest_chosen(encode_batch), MOST_BATCHES * encode_batch
        self.most_candidates = 0
        """Most candidates that a batch was chosen from so far."""

    def count(self, residents: int) -> int:
        """Return how many sequences to encode next: B_E, less the residents above their level.

        It is at least a quarter of B_E and at most twice B_E. Residents may deviate from their level by a share of B_E.
        """
        above = residents - self.level
        if abs(above) <= self.share * self.encode_batch:
            return self.encode_batch
        return min(max(round(self.encode_batch - above), self.fewest), self.most)

    def choose(self, candidates: Items[Sequence], residents: int, exchange: bool = True) -> list[Sequence]:
        """Choose from `candidates`, the first ones in the queue; the chosen ones stay in their order.

        Without `exchange`, they are the first of the candidates: only their number is adjusted. Candidates that have
        been passed over often enough are chosen before others.
        """
        self.most_candidates = max(self.most_candidates, len(candidates))
        count = self.count(residents)
        due = max((i + 1 for i, c in enumerate(candidates) if c.passed_over >= MOST_PASSED_OVER), default=0)
        prompts = [(candidate.to_prefill, place) for place, candidate in enumerate(candidates)]
        chosen, others = prompts[:count], sorted(prompts[count:])
        if others:  # without others, residents are few because few requests wait
            self.level += (residents - self.level) * self.follows
        excess = sum(tokens for tokens, _ in chosen) - self.tokens
        while abs(excess) > self.share * self.tokens:
            nearer = exchange and _exchange(chosen, others, due, excess)
            nearer = nearer or self._resize(chosen, others, excess, len(chosen) - count)
            if not nearer:
                break
            excess += nearer
        return [candidates[place] for place in sorted(place for _, place in chosen)]

    def _resize(self, chosen: list[Prompt], others: list[Prompt], excess: float, more: int) -> int:
        """Drop the last prompt, or add the first of the others, if this brings the batch nearer to its targets.

        `more` sequences were chosen than wanted.

        Returns:
            The tokens by which the sum has changed.
        """
        if excess > 0 and len(chosen) > self.fewest:
            last = max(chosen, key=_place)
            if self._miss(excess - last[0], more - 1) < self._miss(excess, more):
                chosen.remove(last)
                insort(others, last)
                return -last[0]
        elif excess < 0 and others and len(chosen) < self.most:
            first = min(others, key=_place)
            if self._miss(excess + first[0], more + 1) < self._miss(excess, more):
                others.remove(first)
                chosen.append(first)
                return first[0]
        return 0

    def _miss(self, excess: float, more: int) -> float:
        """Return the squared error of a batch with so many tokens and sequences too many."""
        count = self.weight * more
        return excess * excess + count * count


def _place(prompt: Prompt) -> int:
    return prompt[1]


def _exchange(chosen: list[Prompt], others: list[Prompt], due: int, excess: float) -> int:
    """Exchange the two prompts that bring the sum nearest to its target, if any do; the first `due` ones stay.

    `others` are sorted. For each prompt there are up to two exchanges: with the nearest shorter and longer one.

    Returns:
        The tokens by which the sum has changed.
    """
    best, leaves, comes = abs(excess), -1, -1
    for place in range(due, len(chosen)):
        wanted = chosen[place][0] - excess
        above = bisect_left(others, (wanted,))
        for other in (above - 1, above):
            if 0 <= other < len(others) and abs(others[other][0] - wanted) < best:
                best, leaves, comes = abs(others[other][0] - wanted), place, other
    if leaves < 0:
        return 0
    gone, chosen[leaves] = chosen[leaves], others.pop(comes)
    insort(others, gone)
    return chosen[leaves][0] - gone[0]
