"""The recurrences that pipelines follow, cell by cell, compiled (recurrences.c).

All arrays are contiguous, of float64 but for `places`. Seconds throughout; `hop` [stages] are those from the stage
before to each stage.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

def decode_seconds(
    places: NDArray[np.intp],
    layers: Array,
    sequences: Array,
    rest: Array,
    batches: Array,
    contexts: Array,
    attention: Array,
    batch: Array,
    context: Array,
    out: Array,
) -> None:
    """A `DecodeTableCache`'s seconds at `batch` and `context` [n], into `out` [n, stages of the side]."""

def rounds(seconds: Array, out: Array, micro_batches: float, way: float) -> None:
    """How long iterations of equal micro-batches last, into `out` [iterations]: while the slowest stage of `seconds`
    [iterations, stages] has micro-batches to do, or as one needs to come around, `way` between the stages included.
    """

def phases(
    encode: Array,
    decode: Array,
    encode_hop: Array,
    decode_hop: Array,
    decoded: Array,
    micro_batches: int,
    joins: int,
    most: int,
) -> tuple[float, float, tuple[float, float], tuple[float, float]]:
    """`PhaseTimes` but for `decoded` [iterations], which is written.

    `encode` [encoding micro-batches, stages], `decode` [iterations, 1 or micro_batches, stages]. New sequences join
    `joins` micro-batches, in turn from phase to phase where they are fewer. Phases run until the pipeline's state is
    that of a few phases before, later by the same time everywhere; after `most` of them the mean over the later half is
    close. One phase runs in an empty pipeline, and its period is its length.
    """

def iterations(decode: Array, hop: Array, previous: Array, starts: Array, ends: Array) -> None:
    """Start and end of every cell of `decode` [iterations, micro-batches, stages], from an empty pipeline; `previous`
    [micro-batches], from when on each one may start, becomes when its last iteration is out.
    """

def tandem(seconds: Array, hop: Array, starts: Array, outs: Array, most: int) -> None:
    """Start of every item [items] of `seconds` [items, stages], and when it leaves the last stage; at most `most` are
    inside at once.
    """

def follow(
    seconds: Array,
    hops: Array,
    ready: Array,
    free: Array,
    busy: Array,
    starts: Array,
    ends: Array,
    now: float,
    until: float,
    ahead: bool,
) -> tuple[int, float]:
    """Run iterations until the next one would be decided at `until` or later: when the first stage is free, or `ahead`,
    when an iteration starts there.

    `seconds` [iterations, micro-batches, stages], `hops` [micro-batches, stages]; `ready` [micro-batches], from when on
    each one may start, `free` [stages], and the stages' seconds of work, `busy` [stages], are updated, and the cells'
    `starts` and `ends` written. Returns how many iterations ran, and when the next one is decided.
    """

def repeated(
    seconds: Array,
    hops: Array,
    repeats: Array,
    waits: Array,
    gives: Array,
    firsts: Array,
    lasts: Array,
    frees: Array,
) -> None:
    """Run iterations one after the other from an empty pipeline, `repeats` [n] times each, of those that give tokens
    (`gives` [n], not 0) two for each stage but one at most under way.

    `seconds` and `hops` [n, micro-batches, stages] are of one such iteration. `waits` [n, micro-batches]: positive
    where a micro-batch takes the tokens of its iteration before, 0 where it has prompts alone, negative where it has
    nothing. An iteration without any waits until all stages are free. Writes when each micro-batch leaves the last
    stage in the first and in the last of these iterations, [n, micro-batches], and when the next one may begin after
    them, [n].
    """

def slots(
    lengths: Array,
    stays: Array,
    starts: Array,
    ends: Array,
    iterations: Array,
    at: Array,
    prompt: Array,
    froms: Array,
    untils: Array,
    budget: float,
    share: float,
    idle: float,
    residents: int,
) -> tuple[int, int]:
    """Follow prompts of some `lengths` [prompts] that share iterations, first come, first served.

    An iteration has room for `budget` of prompts, less `share` for every sequence that decodes in it; what is left of a
    prompt goes on in the next. `residents` slots: a prompt's sequence decodes for its `stays` [prompts] iterations
    after its last one, its slot is empty for `idle` more, and the next prompt takes it. Writes every prompt's first and
    last iteration to `starts` and `ends` [prompts]; the numbers of the `iterations` with prompts, or with slots that
    are empty; and of the prompts' parts the iteration, the prompt, and from where to where they go. Returns how many
    iterations and parts these are; 0 and 0 where the arrays are too short.
    """

def mixture_quantile(mean: Array, deviation: Array, p: Array, q: float) -> float:
    """The smallest value at or below which the share `q` of a mixture of normal distributions is, to a millionth."""
