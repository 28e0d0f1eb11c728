"""Prices of devices by the hour, in the currency of the file."""

import math
from dataclasses import dataclass
from pathlib import Path

from xcore.errors import InputError
from xcore.specs.cluster import ClusterSpec
from xcore.specs.device_names import device_kind
from xcore.specs.workload import Workload

Prices = dict[str, float]
"""Device kind → price of one device for an hour."""


@dataclass(frozen=True)
class TokenPrice:
    """The price of a million tokens, in the currency of the file."""

    output: float
    """If output tokens alone are counted."""
    total: float
    """If prompts and output tokens are counted alike."""

    @property
    def document(self) -> dict[str, float]:
        """The keys of an answer in JSON."""
        return {"price_per_million_output_tokens": self.output, "price_per_million_tokens": self.total}


NO_TOKEN_PRICE = {"price_per_million_output_tokens": None, "price_per_million_tokens": None}
"""The keys of an answer in JSON if there is no price."""


def token_price(price_hour: float, rate_seq_s: float, workload: Workload) -> TokenPrice:
    """Return the price of a million tokens on devices of this price per hour, at a rate in requests/s."""
    each = 1e6 * price_hour / (3600 * rate_seq_s)
    return TokenPrice(each / workload.output.mean, each / (workload.input.mean + workload.output.mean))


def read_prices(path: Path) -> Prices:
    """Read prices from a YAML file, `A40: 0.79` on a line; InputError if it is missing or a price isn't positive."""
    from xcore.document import read_yaml

    data = read_yaml(path, "price")
    if not isinstance(data, dict) or not data:
        raise InputError(
            f"'{path}' has no prices: write a line like 'A40: 0.79' for each device kind (the price of a device-hour)."
        )
    return {str(kind): _price(kind, value, path) for kind, value in data.items()}


def _price(kind: object, value: object, path: Path) -> float:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not (math.isfinite(number) and number > 0):
        raise InputError(f"'{path}': {value!r} is not a price of {kind}: it must be a positive number per device-hour.")
    return float(number)


def _kind(name: str) -> str:
    """Return the built-in kind that a name stands for, else the name."""
    try:
        return device_kind(name).kind
    except InputError:
        return name


def device_price(prices: Prices, kind: str) -> float | None:
    """Return the price of one device of a kind for an hour; None if the kind has no price."""
    for known, price in prices.items():
        if kind.lower() in (known.lower(), _kind(known).lower()):
            return price
    return None


def price_per_hour(prices: Prices, cluster: ClusterSpec) -> float:
    """Return the price of all devices of a cluster for an hour; InputError if their kind has no price."""
    kind = cluster.device.kind
    price = device_price(prices, kind)
    if price is None:
        known = ", ".join(prices)
        raise InputError(f"The price file has no price of {kind}, only of {known}: add a line '{kind}: PRICE'.")
    return price * cluster.devices
