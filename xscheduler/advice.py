"""Explain why an answer is what it is and what would improve it, in sentences with the answers' own figures."""

import math
from collections.abc import Callable
from dataclasses import replace

from xcore.duration import duration_text, format_duration
from xcore.quantity import figure_text, more_text
from xcore.specs.cluster import ClusterSpec
from xcore.specs.estimate import Estimate
from xcore.specs.schedule import Schedule
from xcore.specs.workload import MAX_TOKENS
from xscheduler.tuned import Tuned
from xsimulator.steady.residents import expected_longest

Answer = tuple[Schedule, Estimate]

LOOSER = 1.5
"""Factor by which a bound is loosened to see what the bound costs."""
TIMES = {"latency": "latency", "ttft": "time to first token", "tpot": "time per output token"}
"""The names of the constraints that bound a time."""
_WORTH_SAYING = 0.02
"""Differences below this share explain nothing and are not printed."""


def decoding(estimate: Estimate) -> float | None:
    """Return about how many sequences are decoded at a time over the cluster, by Little's law.

    Assumes that a token of a long output takes as long as a token of a short one. None if outputs have one token.
    """
    rate = estimate.throughput_tok_s - estimate.throughput_seq_s  # tokens after the first
    return rate * estimate.tpot_s if estimate.tpot_s else None


def idle(estimate: Estimate) -> float | None:
    """Return the mean idle share of the devices; None without utilisation."""
    return 1 - sum(estimate.utilisation) / len(estimate.utilisation) if estimate.utilisation else None


def memory_share(answer: Answer) -> float:
    """Return the memory use of the fullest device as a share of its usable memory."""
    _, estimate = answer
    return max(estimate.memory_bytes) / (estimate.usable_bytes or math.inf)


def why_behind(best: Answer, other: Answer) -> list[str]:
    """Explain why `other` is slower than `best`.

    First come the differences between their figures, the greatest first. Then come the effects of the two policies.
    """
    return [*_figures(best, other), *_ways(best, other)]


def _figures(best: Answer, other: Answer) -> list[str]:
    reasons: list[tuple[float, str]] = []
    many, most = decoding(other[1]), decoding(best[1])
    if many and most:
        lost = 1 - many / most
        fewer = f"{figure_text(most)} in the best ({lost:.0%} fewer)"
        reasons.append((lost, f"about {figure_text(many)} sequences are decoded at a time instead of {fewer}"))
    if other[1].tpot_s and best[1].tpot_s:
        slower = other[1].tpot_s / best[1].tpot_s - 1
        times = f"{duration_text(other[1].tpot_s)} instead of {duration_text(best[1].tpot_s)} in the best"
        reasons.append((slower, f"a token takes {times} ({more_text(slower + 1)})"))
    idles, least = idle(other[1]), idle(best[1])
    if idles is not None and least is not None:
        reasons.append(
            (idles - least, (f"devices are idle {idles:.0%} of the time instead of {least:.0%} in the best"))
        )
    return [text for lost, text in sorted(reasons, reverse=True) if lost > _WORTH_SAYING]


def _ways(best: Answer, other: Answer) -> list[str]:
    """Return the reasons that follow from how the two policies work."""
    schedule = other[0]
    traits, ahead = schedule.traits, best[0].traits
    one_stack = not schedule.model.spec.encoder_layers
    reasons = []
    if one_stack and ahead.mixed and not (traits.mixed or traits.disaggregated):
        reasons.append(
            "prefill and decode read the weights one after the other, but the best schedule reads them once for both"
        )
    if one_stack and traits.disaggregated and not ahead.disaggregated:
        reasons.append("each layer's weights are stored twice")
    if ahead.early_termination and not traits.early_termination:
        output = schedule.workload.output
        longest = expected_longest(output, schedule.control.batch or 1)
        if output.mean < (1 - _WORTH_SAYING) * longest:
            lengths = f"{figure_text(longest)} tokens, although the mean output has {figure_text(output.mean)}"
            reasons.append(f"a batch runs until its longest output ends, {lengths}")
    return reasons


WIDTHS = {
    "measured": "the profile was measured with at most {}: --profile roofline also covers more",
    "resident": "at most {} are allowed: pass more requests, or fix the batch with an option",
}
"""The constraints on sequences decoded at a time, with the text for each."""


def too_wide(widest: tuple[str, int | None], share: float) -> str:
    """Return as text which limit decoding `share` times the sequences of `Problem.widest` would exceed."""
    why, most = widest[0], widest[1] or MAX_TOKENS
    return f"decode {round(share * most):,} sequences at a time, and {WIDTHS[why].format(f'{most:,}')}"


def busy_text(estimate: Estimate) -> str:
    """Return the sentence for an answer that cannot be improved."""
    idles = idle(estimate)
    busy = "the devices are busy" + ("" if idles is None else f" {1 - idles:.0%} of the time")
    return f"{busy}, and a bound 10% looser would not give more throughput"


def use_of(answer: Answer) -> str:
    """Return a sentence on how full and how busy the devices are."""
    share, idles = memory_share(answer), idle(answer[1])
    many = decoding(answer[1])
    parts = [f"{share:.0%} of the usable memory at the peak"]
    if idles is not None:
        parts.append(f"devices busy {1 - idles:.0%} of the time")
    if many:
        parts.append(f"about {figure_text(many)} sequences decoded at a time")
    return "use: " + ", ".join(parts)


Retune = Callable[[float | None, ClusterSpec, float], Tuned]
"""Searches with another bound in seconds or on another cluster, for more than this many tokens/s.

The result is a lower bound.
"""


def looser_bound(again: Retune, answer: Tuned, bound_s: float | None, cluster: ClusterSpec) -> str | None:
    """Return the least gain from a looser bound, as a sentence; None if there is no bound."""
    if bound_s is None:
        return None
    reached = answer.estimate.throughput_tok_s if answer.estimate else 0.0
    loose = again(LOOSER * bound_s, cluster, reached)
    asked = f"a bound of {format_duration(LOOSER * bound_s)} instead of {format_duration(bound_s)}"
    no_better = f"no better schedule was found for {asked}"
    if loose.estimate is None or loose.schedule is None:
        return no_better if reached else f"{asked} would not be enough"
    if answer.estimate is None:
        return (
            f"{asked} would give {figure_text(loose.estimate.throughput_tok_s)} tokens/s with policy "
            f"{loose.schedule.policy}"
        )
    gain = loose.estimate.throughput_tok_s / answer.estimate.throughput_tok_s - 1
    if gain < 0.005:  # less is printed as 0%
        return no_better
    return f"{asked} would give at least {more_text(gain + 1)} throughput, with {loose.schedule.policy}"


def other_cluster(again: Retune, answer: Tuned, bound_s: float | None, cluster: ClusterSpec, what: str) -> str:
    """Return the least gain from another cluster, as a sentence; `what` says why this cluster is considered.

    A whole multiple of the same devices gives at least that multiple of the throughput, with as many times the
    replicas.
    """
    would = f"{cluster.name} ({what}) would"
    if answer.estimate is None or answer.schedule is None:
        there = again(bound_s, cluster, 0.0)
        if there.estimate is None or there.schedule is None:
            return f"{would} not be enough"
        return f"{would} give {figure_text(there.estimate.throughput_tok_s)} tokens/s with {there.schedule.policy}"
    before, reached, policy = answer.schedule.cluster, answer.estimate.throughput_tok_s, answer.schedule.policy
    more = cluster.devices / before.devices
    least = more * reached if before.device == cluster.device and more == int(more) else 0.0
    there = again(bound_s, cluster, least)
    if there.estimate is not None and there.schedule is not None:
        least, policy = there.estimate.throughput_tok_s, there.schedule.policy
    if not least:
        return f"{would} not be enough"
    times = least / reached
    per_device = "" if more == 1 else f", {times / more:,.2f} times per device"
    tokens = f"{figure_text(least)} tokens/s with {policy}"
    return f"{would} give at least {times:,.2f} times the throughput{per_device}: {tokens}"


def twice(cluster: ClusterSpec) -> ClusterSpec:
    """Return the cluster with twice the devices: in the node up to eight devices, otherwise as more nodes."""
    if cluster.nodes == 1 and cluster.devices_per_node <= 4:
        larger = replace(cluster, devices_per_node=2 * cluster.devices_per_node)
    else:
        larger = replace(cluster, nodes=2 * cluster.nodes)
    nodes = f"{larger.nodes}x" if larger.nodes > 1 else ""
    return replace(larger, name=f"{nodes}{larger.devices_per_node}x{larger.device.kind}")
