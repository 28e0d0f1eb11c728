"""The output of `exegpt tune --devices`: how many devices of which kind sustain a rate."""

from dataclasses import replace

from exegpt.api.device_offers import DeviceOffers, device_offers
from exegpt.api.tuning import TuneProblem, arrival_rates
from exegpt.cli import INFEASIBLE
from exegpt.cli.load_day import curve_document, print_curve
from exegpt.cli.prices import TOKEN_PRICES, token_prices
from exegpt.cli.rated import frontier_document, offer_document, print_offers
from xcore.console import output
from xcore.console.schedule_text import variables_text
from xcore.duration import format_duration
from xcore.quantity import figure_text
from xcore.specs.price import NO_TOKEN_PRICE, TokenPrice, token_price
from xscheduler.device_search import Option
from xscheduler.replica_layout import DevicesNeeded

OTHERS = 6
"""Most kinds without an answer that a table shows."""


def answer(problem: TuneProblem) -> int:
    """Search the device kinds under every bound at every rate, and print; return the exit code."""
    points = [(bound_s, rate) for bound_s in problem.bounds_s for rate in arrival_rates(problem)]
    answers, documents = [], []
    for bound_s, rate_seq_s in points:
        asked = replace(problem, bounds_s=(bound_s,), rates_seq_s=(rate_seq_s,))
        offers = device_offers(asked)
        answers.append(offers)
        if problem.options.json:
            documents.append(_document(offers, asked))
        else:
            _print(offers, asked)
    if documents:
        output.emit(documents[0] if len(documents) == 1 else frontier_document(documents, problem))
    return 0 if any(offers.best and offers.best.feasible for offers in answers) else INFEASIBLE


def _document(offers: DeviceOffers, problem: TuneProblem) -> dict[str, object]:
    """Return the best answer's document with all answers under `needed`."""
    seed = problem.options.seed
    best = {"schedule": None, "provenance": output.provenance(seed=seed)}
    return (offer_document(offers.best, problem.target, seed) if offers.best else best) | {
        "latency_bound_s": problem.bounds_s[0],
        "rate_seq_s": offers.asked.rate_seq_s,
        "needed": [_needed(one, offers) for one in offers.needed],
        "other_kinds": [_at_least(option, offers) for option in offers.others],
        "left_out": offers.left_out,
        **curve_document(problem, offers.best),
    }


def _needed(one: DevicesNeeded, offers: DeviceOffers) -> dict[str, object]:
    price = _price(one, offers)
    return {
        "kind": one.layout.kind,
        "devices": one.devices,
        "cluster": one.cluster.name,
        "replicas": one.schedule.replicas,
        "tp": one.layout.tp,
        "pp": one.layout.pp,
        "expert_parallel": one.layout.expert_parallel,
        "attention_dp": one.layout.shared,
        "goodput_seq_s": one.goodput_seq_s,
        "price_per_hour": one.price_hour,
        **(price.document if price else NO_TOKEN_PRICE),
    }


def _at_least(option: Option, offers: DeviceOffers) -> dict[str, object]:
    layout, replicas = option.layout, option.fewest(offers.asked)
    price_hour = offers.asked.price(layout, replicas)
    least = {"devices_at_least": replicas * layout.devices, "price_per_hour_at_least": price_hour}
    experts = {"expert_parallel": layout.expert_parallel, "attention_dp": layout.shared}
    return {"kind": layout.kind, "tp": layout.tp, "pp": layout.pp} | experts | least


def _price(one: DevicesNeeded, offers: DeviceOffers) -> TokenPrice | None:
    if one.price_hour is None:
        return None
    return token_price(one.price_hour, offers.asked.rate_seq_s, one.layout.setting.workload)


def _print(offers: DeviceOffers, problem: TuneProblem) -> None:
    """Print a table of the answers and of what other kinds need at least, then the best schedule."""
    asked, priced = offers.asked, offers.asked.prices is not None
    policies = ", ".join(asked.search.policies)
    output.note(f"· policies: {policies}; --policy names others")
    for reason in dict.fromkeys(offers.left_out.values()):
        kinds = [kind for kind, why in offers.left_out.items() if why == reason]
        output.note(f"· left out: {', '.join(kinds)}: {reason}")
    if not priced:
        output.note("· without prices, answers are ranked by their number of devices; --price FILE ranks them by price")
    if not offers.best:
        return output.note("No device kind sustains the rate within the bounds.")
    columns = [
        "devices",
        "replica",
        "replicas",
        *(["price/h", *TOKEN_PRICES] if priced else []),
        "goodput/s",
        "schedule",
    ]
    rows = [_row(one, offers) for one in offers.needed] + [_least_row(option, offers) for option in offers.others]
    bound = format_duration(problem.bounds_s[0])
    output.table(columns, rows, f"Devices for {figure_text(asked.rate_seq_s, 6)} requests/s, {bound}")
    print_offers([offers.best], problem)
    print_curve(problem, offers.best)


def _row(one: DevicesNeeded, offers: DeviceOffers) -> list[str]:
    prices = [output.number(one.price_hour), *token_prices(_price(one, offers))] if offers.asked.prices else []
    figures = [str(one.schedule.replicas), *prices, output.number(one.goodput_seq_s)]
    return [one.cluster.name, one.layout.name, *figures, variables_text(one.schedule).partition(" on ")[0]]


def _least_row(option: Option, offers: DeviceOffers) -> list[str]:
    """Return the row of a kind that was not measured, because it can't be better."""
    layout, replicas = option.layout, option.fewest(offers.asked)
    price = offers.asked.price(layout, replicas)
    prices = [f"≥ {output.number(price)}", "–", "–"] if offers.asked.prices else []
    return [
        f"≥ {replicas * layout.devices}x{layout.kind}",
        layout.name,
        f"≥ {replicas * layout.shared}",
        *prices,
        "–",
        "not measured",
    ]
