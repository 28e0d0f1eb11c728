"""Inputs in which mistakes show, and that are as large as real ones.

Independent normal values hide them: at a context of 32k every output of attention is the mean of so many values that
one missing token changes it by half a percent, and one token more than top-p keeps is hardly ever drawn.
"""

import math
from dataclasses import dataclass, replace

import torch

from exegpt.kernels.philox import arrival_times
from exegpt.kernels.sampling import Sampling

_RUN = 16
"""Neighbouring tokens that the same broad queries look at."""
_MARGIN = 0.01
"""By how much the winner of a row's race is ahead, in logarithms of its time: many roundings."""


def telling_attention(
    queries: int,
    kv_heads: int,
    size: int,
    new: int,
    context: int,
    scale: float,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One sequence's (q [new, queries, size], k and v [context, kv_heads, size]).

    Of the rows (token, head), every other one is *narrow*: it gives its own token, the last that it sees, about as much
    weight as all others together, so that it changes a lot without that token, or where the scale is another. The
    others are *broad*: they see nothing but every n-th run of 16 tokens, evenly, for n = half the query heads, each
    head other ones. So their outputs are sums of few enough values for one run's absence or exchange to be seen: at
    least 1 / √(context / 16n) of them, 3 % at 262,144 tokens with 32 heads.
    """
    group, runs = queries // kv_heads, min(size, max(1, queries // 2))
    q = torch.randn(new, queries, size, device=device)
    k, v = (torch.randn(context, kv_heads, size, device=device) for _ in range(2))
    heads, places = torch.arange(queries, device=device), torch.arange(context, device=device)
    narrow = ((torch.arange(new, device=device)[:, None] + heads) % 2 == 0)[..., None]
    q = torch.where(narrow, q, q / 4)
    strength = math.sqrt(math.log(8 * runs) / scale)  # the runs that a row looks at weigh eight times as much as others
    k[..., :runs] = 0
    k[places, :, places // _RUN % runs] = strength
    q[:, heads, heads // 2 % runs] += strength * ~narrow[..., 0]
    last_keys = k[context - new :].repeat_interleave(group, 1)
    q += narrow * last_keys * (math.log(max(2, context)) / scale / last_keys.square().sum(-1, keepdim=True))
    return q.to(dtype), k.to(dtype), v.to(dtype)


@dataclass(frozen=True)
class Choice:
    """How tokens are chosen in one sampling case."""

    temperature: float = 1.0
    top_k: int = 0
    """About so many are kept; 0 for all."""
    top_p: float = 1.0
    """About this share of what top-k keeps is; 1 for all."""
    penalty: float = 1.0

    @property
    def limited(self) -> bool:
        """Whether not all tokens are kept."""
        return self.top_k > 0 or self.top_p < 1


def telling_sampling(
    choice: Choice, rows: int, vocab: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, Sampling]:
    """Logits [rows, vocab] and how their tokens are chosen: so that to keep one token more or fewer than is asked for,
    or to take other times, gives another token in about every other row, and rounding gives none.

    As in language models, the token of rank r is about r^-1.5 times as likely as the first. In each row one token whose
    time is so early that it wins if it races is at the edge: the last one that is kept in even rows, the first one that
    is not in odd rows. Where all are kept, it wins in each row, and hardly would at another time.
    """
    ranked = -1.5 * torch.arange(1, vocab + 1, device=device).log()
    order = torch.stack([torch.randperm(vocab, device=device) for _ in range(rows)])
    logits = torch.empty(rows, vocab, device=device).scatter_(1, order, ranked.expand(rows, -1)).to(dtype)
    seen = torch.zeros(rows, vocab, dtype=torch.uint8, device=device).scatter_(1, order[:, ::3], 1)

    def fill(value: float, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=kind, device=device)

    how = Sampling(
        temperature=fill(choice.temperature),
        top_k=fill(choice.top_k, torch.int32),
        top_p=fill(choice.top_p),
        penalty=fill(choice.penalty),
        seed=torch.arange(rows, device=device),
        position=fill(7, torch.int64),
        slot=torch.arange(rows, device=device).flip(0),
        seen=seen.flip(0),
    )
    if choice.temperature == 0:
        return logits, how
    while True:
        settled_logits, settled_how, settled = _with_edges(logits, how, choice)
        if settled.all():
            return settled_logits, settled_how
        how = replace(how, position=torch.where(settled, how.position, how.position + 1))


def _with_edges(logits: torch.Tensor, how: Sampling, choice: Choice) -> tuple[torch.Tensor, Sampling, torch.Tensor]:
    """`telling_sampling` at the positions of `how`, and in which rows the race is settled, bool [rows]."""
    rows, vocab = logits.shape
    log_times = arrival_times(how.seed, how.position, vocab).double().log()
    early = log_times.argmin(1, keepdim=True)
    x, seen = _scaled(logits, how), how.seen[how.slot]
    best, order = x.sort(1, descending=True)
    mass = (best - best[:, :1]).exp()
    if choice.top_k:
        mass = mass * (best >= best[:, choice.top_k - 1 : choice.top_k])
    share = mass.cumsum(1) / mass.sum(1, keepdim=True)

    # The rank at the edge; of a token that has a penalty, so that it is far from there without.
    rank = (share < choice.top_p).sum(1, keepdim=True) if choice.top_p < 1 else torch.full_like(early, choice.top_k)
    if not choice.limited:
        rank = torch.full_like(early, math.isqrt(vocab // 4))
    if choice.penalty != 1:
        beyond = torch.arange(vocab, device=x.device) >= rank
        rank = (beyond & (seen.gather(1, order) > 0)).int().argmax(1, keepdim=True)
    value, place = best.gather(1, rank), order.gather(1, rank)
    logits, seen, x = (_exchanged(t, early, place) for t in (logits, seen, x))

    last = torch.arange(rows, device=x.device)[:, None] % 2 == 0  # or the first that isn't kept
    greater = best > value
    if choice.top_p < 1:
        half = (value - best[:, :1]).exp() / 2
        above = (mass * greater).sum(1, keepdim=True)
        top_p = (above + torch.where(last, half, -half)) / mass.sum(1, keepdim=True)
        how = replace(how, top_p=top_p[:, 0].float())
    elif choice.top_k:
        how = replace(how, top_k=(greater.sum(1) + last[:, 0]).int())
    kept = torch.where(last, x >= value, x > value) if choice.limited else torch.ones_like(x) > 0

    score = x - log_times
    first, second = score.where(kept, -math.inf).topk(2, 1).values.unbind(1)
    ahead = score.gather(1, early)[:, 0] - torch.where(kept.gather(1, early)[:, 0], second, first)
    settled = (first - second > _MARGIN) & (ahead > _MARGIN)
    return logits, replace(how, seen=seen[how.slot.argsort()]), settled


def _exchanged(t: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """t [rows, n] with the elements at a and at b, each [rows, 1], exchanged."""
    return t.scatter(1, a, t.gather(1, b)).scatter(1, b, t.gather(1, a))


def _scaled(logits: torch.Tensor, how: Sampling) -> torch.Tensor:
    """Logits with the penalty and over the temperature, float64 [rows, vocab]."""
    x, penalty = logits.double(), how.penalty.double().unsqueeze(1)
    x = torch.where(how.seen[how.slot] > 0, torch.where(x < 0, x * penalty, x / penalty), x)
    return x / how.temperature.double().unsqueeze(1)
