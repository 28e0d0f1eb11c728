"""What is left to do of a sequence."""

from exegpt.batching import Sequence


def remaining_tokens(sequence: Sequence) -> int:
    """Output tokens that it has yet to make, by its hint; at least one."""
    return max(1, (sequence.hints.output_tokens or 0) - sequence.generated)


def remaining_s(sequence: Sequence) -> float:
    """The rest of its time alone, T': in proportion to the tokens that it has yet to make, where they are known."""
    time_s, output = sequence.hints.time_s or 0.0, sequence.hints.output_tokens
    return time_s * remaining_tokens(sequence) / output if output else time_s
