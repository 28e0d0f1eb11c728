"""One replica's continuous batching from event to event, compiled (batching_run.c)."""

from xcore.arrays import Array, Integers

def batching_run(
    prefill: Array,
    sampled: Array,
    decode: Array,
    ready: Array,
    prompts: Integers,
    outputs: Integers,
    following: Integers,
    arrivals: Integers,
    settings: Array,
    done: Array,
    generated: Array,
    computed: Array,
) -> tuple[bytes, float, int, int]:
    """Run n calls; the work's curve as float64 pairs (seconds, multiply-adds), busy seconds, iterations, preemptions.

    `prefill`, `sampled`, `decode`: as in LineCosts. `ready` [n]: seconds; `arrivals`: the calls that don't follow
    another one, by `ready`; `following` [n]: the call that waits from another's end on, or -1. `settings`: start, until
    (no iteration ends later), blocks, blocks of the watermark, tokens of one prefill, whether prompts are padded,
    multiply-adds per token and per position.
    `done` [n], to begin with infinite, gets seconds; `generated` [n] is increased by tokens; `computed` [n], the
    positions that were computed before, by those that are now: only new ones count as work. ValueError where a call
    doesn't fit in the cache.
    """
