"""Remaining work of a sequence."""

from xcore.batching import Sequence


def remaining_tokens(sequence: Sequence) -> int:
    """Return the remaining output tokens, by the sequence's hint; at least one."""
    return max(1, (sequence.hints.output_tokens or 0) - sequence.generated)


def remaining_s(sequence: Sequence) -> float:
    """Return the remaining time alone, T': in proportion to the remaining output tokens, if their number is known."""
    time_s, output = sequence.hints.time_s or 0.0, sequence.hints.output_tokens
    return time_s * remaining_tokens(sequence) / output if output else time_s
