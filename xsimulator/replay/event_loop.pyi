"""The event simulator, compiled (event_loop.c); `compiled.py` packs its arguments."""

from xcore.arrays import Array, Places

def run(
    arrivals: Array,
    inputs: Array,
    outputs: Array,
    steps: Array,
    flags: Array,
    sides: Array,
    settings: Array,
    limits: Array,
    allowed: Array,
    missed: Array,
    used: Array,
    places: Places,
    parents: Places,
    shared: Places,
    warm: Array,
    received: Array,
    pauses: Array,
    following: Places,
    sessions: Places,
    figures: Array,
    busy: Array,
) -> float | None:
    """Run one replica's requests, in order of arrival, to completion.

    Args:
        arrivals: [requests], seconds; infinite where they follow from other turns.
        inputs: [requests], tokens.
        outputs: [requests], tokens.
        steps: [requests], iterations that give the output: its tokens, unless an iteration may give several.
        flags: [requests]; 1: counts, 2: counts for the latency too.
        sides: The packed stages.
        settings: [policy, batch, its other variable, KV blocks, block size, whether encoder-decoder, admission grow,
            prefix caching, prefixes shared within a step, iterations ahead, draft tokens, an adjustment's numbers,
            seconds from a turn's end to its end for the agent].
        limits: [3], seconds of the time to first token, per output token, and of the latency.
        allowed: [3], the number of counting requests that may miss each limit.
        missed: [3], the number of counting requests that have missed each limit already; updated.
        used: [3], raised to the largest batch and the most KV blocks that the policy used, and to the most requests
            that an adjusted batch was chosen from.
        places: [requests], of a `Prefixes`; empty without prefix caching.
        parents: [texts], of a `Prefixes`; empty without prefix caching.
        shared: [texts], of a `Prefixes`; empty without prefix caching.
        warm: [requests], tokens of each prompt that are always in the cache, whose blocks are not among the KV blocks;
            empty: none. Only without prefix caching.
        received: [requests], tokens of each prompt whose keys and values come with it: they take blocks, but are not
            prefilled, except after a preemption; empty: none. Only without prefix caching and `warm`.
        pauses: [requests], of `FollowingTurns`; empty: all arrivals are known. With turns, limits are infinite.
        following: [requests], `next` of `FollowingTurns`; empty without turns.
        sessions: [sessions], of `FollowingTurns`; empty without turns.
        figures: [requests, 7], written unless a bound was broken: arrived, began, first token, finished; tokens found
            in the cache when first admitted, and in all; preemptions.
        busy: [stages], written: seconds of work.

    Returns:
        The seconds until all work was done; None if a bound was broken before.

    """
