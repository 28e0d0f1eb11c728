"""The recurrences of pipelines over micro-batches and stages, compiled (recurrences.c).

All arrays are contiguous and of float64, except `places`. All times are in seconds. `hop` [stages] is the seconds from
the previous stage to each stage.
"""

from xcore.arrays import Array, Places

def decode_seconds(
    places: Places,
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
    """Write the seconds of a `DecodeTableCache` at `batch` and `context` [n] to `out` [n, stages of the side]."""

def rounds(seconds: Array, out: Array, micro_batches: float, way: float) -> None:
    """Write the seconds of iterations of equal micro-batches to `out` [iterations].

    An iteration lasts as long as the slowest stage of `seconds` [iterations, stages] has micro-batches to do. It lasts
    at least as long as one micro-batch takes around the pipeline, including `way`, the seconds between the stages.
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
    """Return the figures of a `PhaseTimes` in order, and write `decoded` [iterations].

    `encode` is [encoding micro-batches, stages], `decode` is [iterations, 1 or micro_batches, stages]. New sequences
    join `joins` micro-batches; if these are fewer than all, they take turns from phase to phase. Phases run until the
    state of the pipeline repeats that of a few phases before, later by the same time everywhere. If this doesn't happen
    in `most` phases, the mean over the later half is close. A single phase runs in an empty pipeline, and its period is
    its length.
    """

def iterations(decode: Array, hop: Array, previous: Array, starts: Array, ends: Array) -> None:
    """Write the start and end of every cell of `decode` [iterations, micro-batches, stages], from an empty pipeline.

    `previous` [micro-batches] holds the time from which each micro-batch may start. It becomes the time at which the
    micro-batch's last iteration leaves the last stage.
    """

def tandem(seconds: Array, hop: Array, starts: Array, outs: Array, most: int) -> None:
    """Write the start of every item [items] of `seconds` [items, stages], and the time it leaves the last stage.

    At most `most` items are in the stages at once.
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
    """Run iterations until the next one would be decided at `until` or later.

    The next iteration is decided when the first stage is free; with `ahead`, when an iteration starts there. `seconds`
    is [iterations, micro-batches, stages], `hops` is [micro-batches, stages]. Updates `ready` [micro-batches], the time
    from which each one may start; `free` [stages]; and `busy` [stages], the stages' seconds of work. Writes the cells'
    `starts` and `ends`.

    Returns:
        The number of iterations that ran, and the time at which the next one is decided.
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
    """Run iterations one after the other from an empty pipeline, each one `repeats` [n] times.

    Iterations that give tokens (`gives` [n] is not 0) limit each other: at most two per stage, less one, are in flight.
    `seconds` and `hops` [n, micro-batches, stages] are those of one such iteration. `waits` [n, micro-batches] is
    positive if a micro-batch needs the tokens of its previous iteration, 0 if it has only prompts, negative if it is
    empty. An iteration of empty micro-batches alone lasts until all stages are free. Writes `firsts` and `lasts` [n,
    micro-batches]: when each micro-batch leaves the last stage in the first and in the last of these iterations. Writes
    `frees` [n]: when the next iteration may begin.
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

    An iteration takes `budget` of prompts, less `share` for every sequence that decodes in it; the rest of a prompt
    goes on in the next iteration. There are `residents` slots. A prompt's sequence decodes for its `stays` [prompts]
    iterations after its last chunk. Its slot is then empty for `idle` more iterations, and the next prompt takes it.
    Writes every prompt's first and last iteration to `starts` and `ends` [prompts], and the numbers of the `iterations`
    with prompts or empty slots. For every chunk it writes the iteration (`at`), the prompt, and the chunk's range in
    the prompt (`froms`, `untils`).

    Returns:
        The number of iterations and of chunks written; 0 and 0 if the arrays are too short.
    """

def transfers(order: Places, prepared: Array, seconds: Array, arrived: Array, senders: int, receivers: int) -> None:
    """Write when items have `arrived` [items] that are sent in an `order`, each from when it is `prepared`.

    Item i comes from the sender i modulo `senders`; receivers take items in turns, in the order. Each of either has one
    item at a time, for the item's `seconds`.
    """

def mixture_quantile(mean: Array, deviation: Array, p: Array, q: float) -> float:
    """Return the quantile `q` of a mixture of normal distributions, to a millionth."""
