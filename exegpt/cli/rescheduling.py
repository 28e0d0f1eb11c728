"""Searching again while a run goes on, for the lengths that its requests turn out to have."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from exegpt.cli.inputs import Setting
    from exegpt.schedule import Schedule
    from exegpt.workload import Workload
    from xrunner.adaptation import Reschedule

    Found = tuple[Schedule | None, str]
    """A schedule, or why there is none."""

WAA = ("waa-c", "waa-m")
WORTH = 0.1
"""The share of the throughput that other layers or a larger cache must bring: for them everybody waits."""


def rescheduling(setting: "Setting") -> "Reschedule":
    """A search like the one for the schedule that runs: the same policy (of WAA's, either), bound, devices and
    replicas. It says on standard error what it looks for, and what comes of it.
    """
    from exegpt.cli import output
    from exegpt.report.schedule_text import schedule_text

    most = len(setting.workload.requests or ()) or None  # no batch is larger than the list of requests

    def reschedule(workload: "Workload", held: "Schedule") -> "Schedule | None":
        means = f"{workload.input.mean:,.4g} input and {workload.output.mean:,.4g} output tokens on average"
        output.note(f"lengths have changed, to {means}: searching again")
        found, why_not = _in_a_process(best, replace(setting, workload=workload), held, most)
        output.note(f"found: {schedule_text(found)}" if found else f"the run keeps its schedule: {why_not}")
        return found

    return reschedule


def _in_a_process(search: "Callable[..., Found]", *given: Any) -> "Found":
    """What a search finds in a process of its own: a thread would take turns with the run, which then is several times
    as slow.
    """
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_search, args=(there, search, *given), daemon=True)
    process.start()
    there.close()
    try:
        found: Found = here.recv()
    except EOFError:
        process.join()
        return None, f"the search was ended (exit code {process.exitcode})"
    process.join()
    return found


def _search(answer: "Connection", search: "Callable[..., Found]", *given: Any) -> None:
    """The process. It ends with the run, however that ends."""
    import multiprocessing
    import os
    import threading

    from exegpt.errors import InputError

    run = multiprocessing.parent_process()
    assert run
    threading.Thread(target=lambda: (run.join(), os._exit(1)), daemon=True).start()
    os.nice(19)  # where there are no processors to spare, the run goes first
    try:
        answer.send(search(*given))
    except InputError as error:
        answer.send((None, str(error)))


def best(setting: "Setting", held: "Schedule", most: int | None = None) -> "Found":
    """The schedule to go on with where the ranks hold layers and caches for another, and if there is none, why: the
    best one that takes over in place, or, if that is better by more than `WORTH`, the best of all. `most` caps the
    sequences that one replica decodes at once.
    """
    from exegpt.cli.answer import infeasible_text, search_schedule
    from xrunner.adaptation import takes_over_in_place
    from xrunner.place import ranks_needed

    bound_s = math.inf if held.latency_bound_s is None else held.latency_bound_s
    policies = WAA if held.policy in WAA else (held.policy,)

    def search(fixed: dict[str, int], **asked: Any) -> Any:
        asked |= {"policies": policies, "fixed": {"replicas": held.replicas} | fixed, "most_resident": most}
        return search_schedule(setting, bound_s, bound=held.bound, **asked)

    free = search({})
    if free.schedule is None:
        return None, infeasible_text(free, bound_s)
    stays = free
    if not takes_over_in_place(free.schedule, held) and held.policy not in WAA:  # WAA's stages can't be asked for
        stays = search(_degrees(held), kv_blocks=held.kv_blocks)
    need, have = ranks_needed(free.schedule), ranks_needed(held)
    if stays.schedule and takes_over_in_place(stays.schedule, held):
        rates = stays.estimate.throughput_tok_s, free.estimate.throughput_tok_s
        if need != have or rates[0] >= (1 - WORTH) * rates[1]:
            return stays.schedule, ""
    if need != have:
        return None, f"what is best for them is for {need} devices, and this job has {have}"
    return free.schedule, ""


def _degrees(held: "Schedule") -> dict[str, int]:
    """The tensor parallelism of a schedule's stages, as a search is asked for it."""
    degree = max(stage.tp for stage in held.stages)
    grouped = sum(stage.tp for stage in held.stages if stage.tp > 1)
    return {"tp_degree": degree} | ({"tp_gpus": grouped} if grouped else {})
