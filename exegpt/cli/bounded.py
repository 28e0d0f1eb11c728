"""The output of `exegpt tune` without a rate: the best schedule under each latency bound."""

import gc
from collections.abc import Sequence

from exegpt.api.tuning import BoundedAnswer, TuneProblem, tune_bounds
from exegpt.cli import INFEASIBLE
from exegpt.cli.answer import (
    answer_document,
    best_row,
    bounded_times,
    policy_columns,
    policy_rows,
    print_best,
    print_export,
    print_plot,
    print_search,
    whose,
)
from exegpt.cli.prices import print_price
from xcore.console import output
from xcore.console.schedule_text import schedule_text
from xcore.duration import format_duration
from xcore.specs.price import NO_TOKEN_PRICE
from xscheduler.drafts import gain_texts
from xscheduler.expert_divisions import divided_as
from xscheduler.setting_search import infeasible_text, ranked, reasons
from xscheduler.settings import Setting


def answer(problem: TuneProblem) -> int:
    """Search under every bound, and print; return the exit code."""
    gc.disable()  # searches make many small objects without cycles, and the command ends soon
    answers = tune_bounds(problem)
    if problem.options.json:
        _emit(problem, answers)
    else:
        _print(problem, answers)
    return 0 if any(answer.tuned.schedule for answer in answers) else INFEASIBLE


def _emit(problem: TuneProblem, answers: Sequence[BoundedAnswer]) -> None:
    setting = problem.settings[0]
    documents = [
        answer_document(answer.tuned, divided_as(setting, answer.tuned.schedule), problem.target, answer.export)
        | {"advice": answer.advice, "latency_bound_s": answer.bound_s}
        | _prices(answer, setting)
        | ({"speculation": answer.drafting.document} if answer.drafting else {})
        for answer in answers
    ]
    if len(documents) == 1:
        return output.emit(documents[0])
    output.emit({"frontier": documents, "provenance": output.provenance(setting.profile)})


def _prices(answer: BoundedAnswer, setting: Setting) -> dict[str, float | None]:
    """Return the prices of an answer in JSON; no keys without prices."""
    if answer.price_hour is None:
        return {}
    price = answer.token_price(setting)
    return {"price_per_hour": answer.price_hour, **(price.document if price else NO_TOKEN_PRICE)}


def _print(problem: TuneProblem, answers: Sequence[BoundedAnswer]) -> None:
    tuned = [answer.tuned for answer in answers]
    settings = [divided_as(problem.settings[0], answer.schedule).assumptions for answer in tuned]
    output.notes(text for texts in (*settings, *(answer.assumptions for answer in tuned)) for text in texts)
    if len(answers) == 1:
        _print_one(problem, answers[0])
    else:
        _print_frontier(problem, answers)
    if len(answers) == 1 and not answers[0].advice and problem.options.advice is None:
        print("--advice predicts the effect of another bound, of twice the devices and of other devices.")
    for answer in answers:
        if answer.advice:
            under = f" under {format_duration(answer.bound_s)}" if len(answers) > 1 else ""
            output.listed(f"Advice{under}:", answer.advice)
    for answer in answers:
        under = f" under {format_duration(answer.bound_s)}" if len(answers) > 1 else ""
        print_price(answer.price_hour, answer.token_price(problem.settings[0]), under)
    print_search(*tuned)
    if len(answers) > 1:
        print()
        print_plot(tuned, None)
    met = [answer for answer in answers if answer.tuned.schedule]
    if problem.options.out and met:
        under = f" under {format_duration(met[-1].bound_s)}" if len(answers) > 1 else ""
        print(f"Schedule{under} written to {problem.options.out}{whose(problem, met[-1].tuned)}.")
    for answer in answers:
        if len(answers) > 1 and answer.tuned.schedule and problem.settings[0].own:
            print(f"Under {format_duration(answer.bound_s)}:")
        print_best(answer.tuned, problem.settings[0])


def _print_one(problem: TuneProblem, answer: BoundedAnswer) -> None:
    """Print every policy's best schedule, and the reasons for its rank."""
    times, tuned = bounded_times(problem.search), answer.tuned
    output.table(
        policy_columns(times),
        policy_rows(tuned, problem.settings[0], times),
        _title(problem, format_duration(answer.bound_s)),
    )
    if tuned.schedule is None:
        return output.note(infeasible_text(tuned, answer.bound_s))
    feasible = [alternative for alternative in ranked(tuned) if alternative.schedule]
    output.listed(f"Best: {schedule_text(tuned.schedule)}", reasons(feasible, problem.options.explain))
    if len(feasible) > 1 and not problem.options.explain:
        print("--explain prints all reasons for each policy's rank.")
    if answer.drafting:
        output.listed("Speculative decoding:", gain_texts(answer.drafting))
    if problem.target:
        print_export(problem.target, answer.export, times)


def _print_frontier(problem: TuneProblem, answers: Sequence[BoundedAnswer]) -> None:
    """Print the best schedule under each bound, without the reasons for other policies' ranks."""
    times = bounded_times(problem.search)
    rows = [[format_duration(a.bound_s), *best_row(a.tuned, problem.settings[0], a.bound_s, times)] for a in answers]
    output.table(("bound", *policy_columns(times)[1:]), rows, _title(problem, "the best schedule under each bound"))
    for answer in answers:
        if answer.tuned.schedule and problem.target:
            print(f"Under {format_duration(answer.bound_s)}:")
            print_export(problem.target, answer.export, times)


def _title(problem: TuneProblem, what: str) -> str:
    """Return the problem that was searched: model, cluster, lengths and bounds."""
    setting, names = problem.settings[0], {"TTFT": problem.search.ttft_s, "TPOT": problem.search.tpot_s}
    times = "".join(f", {name} {format_duration(bound_s)}" for name, bound_s in names.items() if bound_s is not None)
    return f"{setting.model.name} on {setting.cluster.name}, {setting.workload.name}, {what}{times}"
