"""`exegpt tune` without a rate: the best schedule under each latency bound, where requests always wait."""

import gc
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from exegpt.cli import INFEASIBLE

if TYPE_CHECKING:
    from exegpt.cli.answer import Delivery
    from exegpt.cli.inputs import Setting
    from xscheduler.tuned import Tuned


def answer(
    setting: "Setting", bounds: list[float], asked: dict[str, Any], advice: bool | None, delivery: "Delivery"
) -> int:
    """Search under every bound (seconds; math.inf: none), and deliver; returns the exit code.

    `advice` None: for one bound on at most eight devices.
    """
    from exegpt import document
    from exegpt.cli import output
    from exegpt.cli.answer import advise, search_schedule
    from exegpt.cli.tune_report import write_report

    gc.disable()  # searches leave many small objects and no cycles; the command ends soon
    with output.progress("searching policies") as progress:
        found = [search_schedule(setting, bound_s, progress=progress, **asked) for bound_s in bounds]
    best = next((one for one in reversed(found) if one.schedule), None)
    wanted = advice if advice is not None else len(bounds) == 1 and setting.cluster.devices <= 8
    told = [advise(setting, one, bound_s, asked) if wanted else [] for one, bound_s in zip(found, bounds, strict=True)]
    delivery = replace(delivery, hints=advice is None)
    if delivery.out and best:
        document.write(delivery.out, best.schedule)
    if delivery.report:
        write_report(delivery.report, setting, found, bounds, asked, told[-1])
    if delivery.json:
        _emit(setting, found, told, delivery)
    else:
        _print(setting, found, bounds, asked, told, delivery)
    return 0 if best else INFEASIBLE


def _emit(setting: "Setting", found: "list[Tuned]", told: list[list[str]], delivery: "Delivery") -> None:
    from exegpt.cli import output
    from exegpt.cli.answer import answer_document

    documents = [
        answer_document(one, setting, delivery.target) | {"advice": advice}
        for one, advice in zip(found, told, strict=True)
    ]
    if len(documents) == 1:
        return output.emit(documents[0])
    output.emit({"frontier": documents, "provenance": output.provenance(setting.profile)})


def _print(
    setting: "Setting",
    found: "list[Tuned]",
    bounds: list[float],
    asked: dict[str, Any],
    told: list[list[str]],
    delivery: "Delivery",
) -> None:
    from exegpt.cli import output
    from exegpt.cli.answer import print_plot, print_search

    for text in dict.fromkeys([*setting.assumptions, *(a for one in found for a in one.assumptions)]):
        output.note(f"· {text}")
    if len(found) == 1:
        _print_one(setting, found[0], bounds[0], asked, delivery)
    else:
        _print_frontier(setting, found, bounds, asked, delivery)
    if len(found) == 1 and not told[0] and delivery.hints:
        print("What another bound, twice the devices or other ones would give: --advice.")
    for advice, bound_s in zip(told, bounds, strict=True):
        if advice:
            output.listed("Advice:" if len(told) == 1 else f"Advice under {_text(bound_s)}:", advice)
    print_search(*found)
    if len(found) > 1:
        print()
        print_plot(found, None)
    if delivery.out and any(one.schedule for one in found):
        print(f"Schedule written to {delivery.out}.")


def _print_one(setting: "Setting", found: "Tuned", bound_s: float, asked: dict[str, Any], delivery: "Delivery") -> None:
    """Every policy's best schedule, and why it is where it is."""
    from exegpt.cli import output
    from exegpt.cli.answer import (
        bounded_times,
        infeasible_text,
        policy_columns,
        policy_rows,
        print_export,
        ranked,
        reasons,
    )
    from exegpt.report.schedule_text import schedule_text

    times = bounded_times(asked)
    output.table(policy_columns(times), policy_rows(found, times), _title(setting, _text(bound_s), asked))
    if found.schedule is None:
        return output.note(infeasible_text(found, bound_s))
    output.listed(f"Best: {schedule_text(found.schedule)}", reasons(one for one in ranked(found) if one.schedule))
    if delivery.target:
        print_export(found.schedule, delivery.target)


def _print_frontier(
    setting: "Setting", found: "list[Tuned]", bounds: list[float], asked: dict[str, Any], delivery: "Delivery"
) -> None:
    """The best schedule under each bound; why the others are behind is said when one bound is asked for alone."""
    from exegpt.cli import output
    from exegpt.cli.answer import best_row, bounded_times, policy_columns, print_export

    times = bounded_times(asked)
    rows = [[_text(bound_s), *best_row(one, bound_s, times)] for one, bound_s in zip(found, bounds, strict=True)]
    columns = ("bound", *policy_columns(times)[1:])
    output.table(columns, rows, _title(setting, "the best under each bound", asked))
    for one, bound_s in zip(found, bounds, strict=True):
        if one.schedule and delivery.target:
            print(f"Under {_text(bound_s)}:")
            print_export(one.schedule, delivery.target)


def _title(setting: "Setting", what: str, asked: dict[str, Any]) -> str:
    """What was searched for: model, cluster, lengths and bounds."""
    names = {"TTFT": asked.get("ttft_s"), "TPOT": asked.get("tpot_s")}
    times = "".join(f", {name} {_text(bound_s)}" for name, bound_s in names.items() if bound_s is not None)
    return f"{setting.model.name} on {setting.cluster.name}, {setting.workload.name}, {what}{times}"


def _text(bound_s: float) -> str:
    from exegpt.duration import format_duration

    return format_duration(bound_s)
