"""Prices of devices by the hour, in the currency of the file."""

import math
from pathlib import Path
from typing import Any

from xcore.errors import InputError
from xcore.specs.cluster import ClusterSpec
from xcore.specs.device_names import device_kind

Prices = dict[str, float]
"""Device kind → price of one device for an hour."""


def read_prices(path: Path) -> Prices:
    """Read prices from a YAML file, `A40: 0.79` on a line; InputError if it is missing or a price isn't positive."""
    from xcore.document import read_yaml

    data = read_yaml(path, "price")
    if not isinstance(data, dict) or not data:
        raise InputError(
            f"'{path}' has no prices: write a line like 'A40: 0.79' for each device kind (the price of a device-hour)."
        )
    return {str(kind): _price(kind, value, path) for kind, value in data.items()}


def _price(kind: Any, value: Any, path: Path) -> float:
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


def price_per_hour(prices: Prices, cluster: ClusterSpec) -> float:
    """Return the price of all devices of a cluster for an hour; InputError if their kind has no price."""
    kind = cluster.device.kind
    for known, price in prices.items():
        if kind.lower() in (known.lower(), _kind(known).lower()):
            return price * cluster.devices
    raise InputError(f"The price file has no price of {kind}, only of {', '.join(prices)}: add a line '{kind}: PRICE'.")
