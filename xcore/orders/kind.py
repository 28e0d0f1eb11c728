"""OrderKind: an order by its name, with the hints that it needs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from xcore.batching import Hints, Order
from xcore.errors import InputError
from xcore.orders.ranked_demands import RankedDemands


@dataclass(frozen=True)
class OrderKind:
    """An entry of the registry."""

    name: str
    what: str
    """The request that comes first, in words."""
    make: Callable[[], Order]
    needs: tuple[str, ...] = ()
    """Hints that each sequence must have."""
    oracle: bool = False
    """Whether the order needs the true length of each output."""
    ranks_running: bool = False
    """Whether its keys rank running sequences too, and don't rise while these run."""
    ranked: Callable[[RankedDemands], Order] | None = None
    """Makes an order that ranks applications by their demands; without them, `make` gives one by arrival."""

    def check(self, hints: Iterable[Hints]) -> None:
        """Raise InputError if one of the hints lacks what the order needs."""
        for place, own in enumerate(hints):
            for name in self.needs:
                if getattr(own, name) is None:
                    raise InputError(
                        f"Order {self.name} needs {name} of each request, but request {place} has none: choose "
                        "another order."
                    )
