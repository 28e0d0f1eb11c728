"""The output of `exegpt tune --load-curve`: the replicas of each hour, and what a day costs."""

from exegpt.api.tuning import ClusterOffer, TuneProblem, hours_of
from exegpt.cli.prices import token_prices
from xcore.console import output
from xcore.quantity import figure_text
from xcore.specs.price import NO_TOKEN_PRICE, TokenPrice, token_price
from xscheduler.hourly_replicas import HourlyReplicas


def curve_document(problem: TuneProblem, offer: ClusterOffer | None) -> dict[str, object]:
    """Return the key that a load curve adds to an answer in JSON; no key without a curve or a schedule."""
    day = offer and hours_of(problem, offer)
    if not day or not offer:
        return {}
    device_hour = _device_hour(offer)
    price = _token_price(day, offer)
    hours = [
        {"hour": at.hour, "hours": at.hours, "rate_seq_s": at.rate_seq_s, "replicas": n, "devices": n * day.devices}
        for at, n in zip(day.curve, day.replicas, strict=True)
    ]
    total = None if device_hour is None else device_hour * day.device_hours
    figures = {"hours": hours, "device_hours": day.device_hours, "price": total}
    return {"load_curve": {**figures, **(price.document if price else NO_TOKEN_PRICE)}}


def print_curve(problem: TuneProblem, offer: ClusterOffer) -> None:
    """Print a row for each hour, and the sums; nothing without a load curve or a schedule."""
    day = hours_of(problem, offer)
    if not day:
        return
    device_hour = _device_hour(offer)
    columns = ["hour", "requests/s", "replicas", "devices", *(["price"] if device_hour else [])]
    rows = []
    for at, replicas in zip(day.curve, day.replicas, strict=True):
        devices = replicas * day.devices
        prices = [output.number(device_hour * devices * at.hours)] if device_hour else []
        rows.append([f"{at.hour:g}", figure_text(at.rate_seq_s), str(replicas), str(devices), *prices])
    output.table(columns, rows, f"Replicas over {day.hours:g} hours")
    always = day.devices * max(day.replicas) * day.hours
    print(
        f"{figure_text(day.device_hours, 6)} device-hours over {day.hours:g} hours, "
        f"{figure_text(100 * day.device_hours / always)}% of the peak's devices all the time."
    )
    price = _token_price(day, offer)
    if device_hour and price:
        million, total = token_prices(price)
        print(
            f"Price: {output.number(device_hour * day.device_hours)} over {day.hours:g} hours, {million} per million "
            f"output tokens, {total} per million tokens with the prompts'."
        )
    output.note("· replicas start and stop at once, on the hour; a server takes minutes to load a model")


def _device_hour(offer: ClusterOffer) -> float | None:
    return None if offer.price_hour is None else offer.price_hour / offer.setting.cluster.devices


def _token_price(day: HourlyReplicas, offer: ClusterOffer) -> TokenPrice | None:
    """Return the price of a million tokens over the whole curve; None without prices."""
    device_hour = _device_hour(offer)
    if device_hour is None:
        return None
    return token_price(device_hour * day.device_hours, day.requests / 3600, offer.setting.workload)
