"""memoized: a method whose results its instance keeps."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

Owner = TypeVar("Owner")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def memoized(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> "functools.cached_property[Callable[Arguments, Result]]":
    """The method, called once for the same arguments; its instance holds the results, by the arguments themselves."""

    def of(owner: Owner) -> Callable[Arguments, Result]:
        return functools.cache(functools.partial(method, owner))  # type: ignore[return-value]

    return functools.cached_property(of)
