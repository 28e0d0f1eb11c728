"""Drafts: the search for the best number of draft tokens, and the batches at which drafting pays."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from xcore.errors import InputError
from xcore.specs.acceptance import Acceptance
from xcore.specs.model import ModelSpec
from xcore.specs.profile import Profile
from xcore.specs.schedule import Schedule
from xcore.specs.speculation import MOST_DRAFTED, Speculation
from xscheduler.ceilings import residents_that_fit
from xscheduler.search import total
from xscheduler.setting_search import SearchOptions, search_schedule
from xscheduler.settings import Setting, find_model
from xscheduler.tuned import Tuned
from xsimulator.cost.cost_model import ReplicaCost
from xsimulator.steady.load import Load

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from xscheduler.setting_search import SearchKeywords


MOST_SEARCHED = 8
"""Most draft tokens that a search tries."""
USUAL = 3
"""Number of draft tokens that is tried first."""


@dataclass(frozen=True)
class Drafts:
    """The numbers of draft tokens to try, their acceptance, and the draft model or layers."""

    acceptance: Acceptance
    lengths: tuple[int, ...]
    """The numbers of draft tokens to try; 0: none."""
    layers: float
    draft: ModelSpec | None = None

    @staticmethod
    def of(
        acceptance: str | None, tokens: str | None, draft_model: str | None, layers: float | None
    ) -> "Drafts | None":
        """Return the drafts that options describe; None without any. InputError for options that contradict."""
        if acceptance is None:
            for name, value in (
                ("num-speculative-tokens", tokens),
                ("draft-model", draft_model),
                ("draft-layers", layers),
            ):
                if value is not None:
                    raise InputError(
                        f"--{name} {value} needs the acceptance of draft tokens: add --draft-acceptance, like 0.7."
                    )
            return None
        if draft_model is not None and layers is not None:
            raise InputError(
                f"--draft-model and --draft-layers {layers:g} both choose the drafter: leave one of them out."
            )
        known = Acceptance.parse(acceptance)
        draft = find_model(draft_model) if draft_model else None
        if draft and draft.encoder_layers:
            raise InputError(f"--draft-model {draft_model} has an encoder: use a decoder-only model.")
        drafting = 0.0 if draft else 1.0 if layers is None else layers
        return Drafts(known, _lengths(tokens, known), drafting, draft)

    def at(self, drafted: int) -> Speculation | None:
        """Return the speculation with a number of draft tokens; None for 0."""
        return Speculation(self.acceptance.at(drafted), self.layers, self.draft) if drafted else None

    @property
    def only(self) -> int:
        """Return the number of draft tokens if there is one; InputError for several."""
        if len(self.lengths) > 1:
            raise InputError(
                "The number of draft tokens is searched only by tune: pass --num-speculative-tokens, like 3."
            )
        return self.lengths[0]

    def best(self, rate: Callable[[int, float], float], usual: int = USUAL) -> tuple[int, float]:
        """Return the number of draft tokens with the highest rate, and that rate, climbing from the one near `usual`.

        `rate` takes a number of draft tokens, and the highest rate so far.
        """
        first = min(self.lengths, key=lambda drafted: abs(drafted - usual))
        return climb(self.lengths, first, rate(first, 0.0), rate)


def climb(
    values: tuple[int, ...], first: int, reached: float, measure: Callable[[int, float], float]
) -> tuple[int, float]:
    """Return the value with the highest figure, and the figure, climbing from `first`, which has `reached`.

    `measure` takes a value and the best figure so far. Upwards first; downwards only if that is no better. Where
    `first` reaches nothing, its neighbours may not either: then all values are measured.
    """
    if reached <= 0:
        figures = {first: reached} | {value: measure(value, reached) for value in values if value != first}
        best = max(values, key=figures.__getitem__)
        return best, figures[best]
    start = place = values.index(first)
    for step in (1, -1):
        while 0 <= place + step < len(values) and (figure := measure(values[place + step], reached)) > reached:
            place, reached = place + step, figure
        if place != start:
            break
    return values[place], reached


def _lengths(tokens: str | None, acceptance: Acceptance) -> tuple[int, ...]:
    """Return the numbers of draft tokens that an option names: one, or all known ones up to `MOST_SEARCHED`."""
    if tokens in (None, "auto"):
        searched = [n for n in sorted(acceptance.by_length) if n <= MOST_SEARCHED]
        if not searched:
            raise InputError(
                f"--draft-acceptance is known for {min(acceptance.by_length)} draft tokens or more, but at most "
                f"{MOST_SEARCHED} are searched: pass --num-speculative-tokens, like {min(acceptance.by_length)}."
            )
        return (0, *searched)
    if not tokens or not tokens.isdecimal() or int(tokens) > MOST_DRAFTED:
        raise InputError(f"--num-speculative-tokens {tokens}: use a number up to {MOST_DRAFTED}, or auto.")
    if int(tokens):
        acceptance.at(int(tokens))
    return (int(tokens),)


def search_drafts(
    setting: Setting, bound_s: float | None, drafts: Drafts, options: SearchOptions, **more: "Unpack[SearchKeywords]"
) -> Tuned:
    """Return the best schedule over all numbers of draft tokens.

    Each number is searched only for schedules above the best throughput so far, which ends most searches early.
    """

    def searched(drafted: int, **also: "Unpack[SearchKeywords]") -> Tuned:
        asked = {**vars(options)}
        asked.update(also)
        return search_schedule(replace(setting, speculation=drafts.at(drafted)), bound_s, **asked)

    best, floor, searches = drafts.lengths[0], 0.0, []
    usual = sorted(drafts.lengths, key=lambda drafted: abs(drafted - USUAL))  # a high floor early ends more searches
    for drafted in usual if len(usual) > 1 else ():
        tuned = searched(drafted, floor=floor)
        searches.append(tuned.search)
        if tuned.estimate:
            best, floor = drafted, tuned.estimate.throughput_tok_s
    answer = searched(best, **more)
    if answer.schedule is None and len(drafts.lengths) > 1:
        others = [searched(drafted) for drafted in drafts.lengths]
        answer = min(others, key=lambda tuned: math.inf if tuned.lowest_latency_s is None else tuned.lowest_latency_s)
    searches.append(answer.search)
    return replace(answer, search=total(searches))


@dataclass(frozen=True)
class BatchGain:
    """The best number of draft tokens at one batch."""

    batch: int
    """Sequences that a replica decodes together."""
    drafted: int
    """The best number of draft tokens; 0: drafting makes decoding slower."""
    speedup: float
    """Output tokens per second of decoding with the best number above 0 over those without draft tokens."""


@dataclass(frozen=True)
class DraftGain:
    """The gain of drafting on a schedule's stages, at the mean context."""

    schedule: Schedule
    tokens_per_step: float
    pays_below: int | None
    """The smallest batch from which no number of draft tokens makes decoding faster; None: it pays at all batches."""
    largest_batch: int
    """Sequences of the mean length that memory holds: larger batches aren't compared."""
    by_batch: tuple[BatchGain, ...]

    @property
    def drafted(self) -> int:
        """Return the schedule's number of draft tokens."""
        return self.schedule.speculation.drafted if self.schedule.speculation else 0

    @property
    def document(self) -> dict[str, object]:
        """Return the gain as the object that commands print as JSON."""
        return {
            "draft_tokens": self.drafted,
            "tokens_per_step": self.tokens_per_step,
            "no_longer_pays_from_batch": self.pays_below,
            "largest_batch": self.largest_batch,
            "by_batch": [vars(gain) for gain in self.by_batch],
        }


def draft_gain(schedule: Schedule, profile: Profile, drafts: Drafts) -> DraftGain:
    """Return the gain of drafting on a schedule's stages: decoding alone, without prompts."""
    known = list(drafts.acceptance.by_length)
    lengths = [n for n in drafts.lengths if n] or [n for n in known if n <= MOST_SEARCHED] or known
    plain = _Decoding.of(schedule, profile, None)
    drafting = {n: _Decoding.of(schedule, profile, drafts.at(n)) for n in lengths}

    def gain(batch: int) -> BatchGain:
        best = max(drafting, key=lambda n: drafting[n].rate(batch))
        speedup = drafting[best].rate(batch) / plain.rate(batch)
        return BatchGain(batch, best if speedup > 1.0 else 0, speedup)

    most = max(1, int(residents_that_fit(plain.replica, plain.load)))
    grid = [gain(batch) for batch in sorted({*(1 << i for i in range(most.bit_length())), most})]
    last = max((i for i, at in enumerate(grid) if at.drafted), default=-1)
    pays_below: int | None = None
    if last < len(grid) - 1:
        low, high = (grid[last].batch if last >= 0 else 0), grid[last + 1].batch  # it pays at `low`, not at `high`
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if gain(middle).drafted else (low, middle)
        pays_below = high
    speculation = schedule.speculation
    shown = tuple(at for at in grid if at.batch in _SHOWN or at.batch == most)
    return DraftGain(schedule, speculation.tokens_per_step if speculation else 1.0, pays_below, most, shown)


_SHOWN = (1, 4, 16, 64, 256, 1024)
"""Batches whose gains are printed."""


@dataclass(frozen=True)
class _Decoding:
    """Decode iterations on a schedule's stages with some speculation, or without."""

    replica: ReplicaCost
    load: Load
    tokens_per_step: float

    @staticmethod
    def of(schedule: Schedule, profile: Profile, speculation: Speculation | None) -> "_Decoding":
        replica = ReplicaCost.of(replace(schedule, speculation=speculation), profile)
        load = Load(schedule.workload, replica.encoder_decoder)
        return _Decoding(replica, load, speculation.tokens_per_step if speculation else 1.0)

    def rate(self, batch: int) -> float:
        """Return the output tokens/s of a replica that decodes `batch` sequences in a micro-batch per stage."""
        side = self.replica.decode
        parts = min(len(side.stages), batch)
        cells = side.decode(np.array(batch / parts), np.array(self.load.resident_context))
        around = float(cells.sum()) + side.hops_together(side.rows * batch / parts)
        return batch * self.tokens_per_step / max(parts * float(cells.max()), around)


def gain_texts(gain: DraftGain) -> list[str]:
    """Return sentences on the number of draft tokens, and on the batches at which drafting pays."""
    tokens = "draft token" if gain.drafted == 1 else "draft tokens"
    drafted = f"{gain.drafted} {tokens} in each decode iteration" if gain.drafted else "no draft tokens"
    texts = [f"{drafted}, {gain.tokens_per_step:.3g} tokens per iteration and sequence on average"]
    if gain.pays_below is None:
        texts.append(f"drafting makes decoding faster at every batch that memory holds, up to {gain.largest_batch:,}")
    elif gain.pays_below == 1:
        return [*texts, "drafting makes decoding slower at every batch"]
    else:
        texts.append(f"from {gain.pays_below:,} sequences decoded together in a replica, drafting no longer pays")
    best = [f"{at.drafted} at {at.batch:,}" + f" ({at.speedup:.3g}x)" * (at.drafted > 0) for at in gain.by_batch]
    texts.append(f"best number of draft tokens by sequences decoded together (decoding speed): {', '.join(best)}")
    return texts
