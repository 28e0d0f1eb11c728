"""Prices in answers: per hour, and per million tokens."""

from xcore.console import output
from xcore.specs.price import TokenPrice

TOKEN_PRICES = ("price/M output", "price/M tokens")
"""The columns of `token_prices`."""


def token_prices(price: TokenPrice | None) -> list[str]:
    """Return the cells of the columns `TOKEN_PRICES`."""
    return [output.number(price.output), output.number(price.total)] if price else ["–", "–"]


def print_price(price_hour: float | None, price: TokenPrice | None, under: str = "") -> None:
    """Print the price per hour and per million tokens; nothing without prices. `under` names the bound."""
    if price_hour is None or price is None:
        return
    million, total = token_prices(price)
    print(
        f"Price{under}: {output.number(price_hour)} per hour, {million} per million output tokens, {total} per million "
        "tokens with the prompts'."
    )
