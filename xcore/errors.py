"""The two kinds of refusal: the input is wrong, or no schedule meets the bound."""

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """A bad input. The message is one sentence: the problem, the value, and the way out. Exit code 2."""


class TooLong(InputError):
    """A request that fits neither the model's context nor the cache."""


class Infeasible(Exception):
    """No schedule meets the bound. Exit code 3.

    `lowest_latency_s` is the lowest latency that any searched schedule reaches, in seconds; None if not even one
    sequence fits in memory.
    """

    def __init__(self, message: str, lowest_latency_s: float | None):
        super().__init__(message)
        self.lowest_latency_s = lowest_latency_s


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn any exception of a library into an InputError that begins with `what`."""
    try:
        yield
    except (InputError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        reason = str(error).strip().partition("\n")[0].rstrip(". ") or type(error).__name__
        raise InputError(f"{what}: {reason}.") from None
