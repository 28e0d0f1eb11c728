"""memoized: decorator of a method whose results the instance caches."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

Owner = TypeVar("Owner")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def memoized(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> "functools.cached_property[Callable[Arguments, Result]]":
    """Cache a method's results in its instance, by the arguments; the method runs once for equal arguments."""

    def of(owner: Owner) -> Callable[Arguments, Result]:
        return functools.cache(functools.partial(method, owner))  # type: ignore[return-value]

    return functools.cached_property(of)
