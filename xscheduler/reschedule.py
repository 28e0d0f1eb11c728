"""Searching again while a run goes on, for the lengths that its requests turn out to have."""

import subprocess
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from xcore import document
from xcore.errors import Infeasible, InputError
from xcore.policies import TRAITS, Traits
from xcore.quantity import figure_text
from xcore.searching import process_text, read_question, write_answer
from xcore.specs.schedule import BLOCK_SIZE, Schedule
from xcore.specs.workload import Workload
from xscheduler.settings import Setting

if TYPE_CHECKING:
    from xcore.specs.change import Reschedule

WORTH = 0.1
"""The share of the throughput that other layers or a larger cache must bring: for them all requests wait."""
_PROCESS = process_text("xscheduler.reschedule")


@dataclass(frozen=True)
class SearchInput:
    """What `best` is asked for."""

    setting: Setting
    held: Schedule
    most: int | None
    arrivals: bool = False
    """Whether requests arrive over time: the highest goodput is searched, not the highest throughput."""


class NewSchedule(NamedTuple):
    """A schedule, or why there is none."""

    schedule: Schedule | None
    why_not: str = ""


def rescheduler(setting: Setting, arrivals: bool = False) -> "Reschedule":
    """A search like the one for the schedule that runs: the same policy (of WAA's, either), bound, devices and
    replicas. It says on standard error what it looks for, and what comes of it.
    """
    from xcore.console import output
    from xcore.console.schedule_text import schedule_text

    most = len(setting.workload.requests or ()) or None  # no batch is larger than the list of requests

    def reschedule(workload: Workload, held: Schedule) -> Schedule | None:
        means = [figure_text(distribution.mean, 4) for distribution in (workload.input, workload.output)]
        note = f"lengths have changed, to {means[0]} input and {means[1]} output tokens on average"
        output.note(f"{note}: searching again")
        schedule, why_not = in_a_process(SearchInput(replace(setting, workload=workload), held, most, arrivals))
        output.note(f"found: {schedule_text(schedule)}" if schedule else f"the run keeps its schedule: {why_not}")
        return schedule

    return reschedule


def in_a_process(search_input: SearchInput) -> NewSchedule:
    """What `best` finds in a process of its own: a thread would take turns with the run, which then is several times as
    slow. Question and answer are JSON on its standard input and output; it ends when the former does, with the run.
    """
    command = [sys.executable, "-c", _PROCESS, *sys.path]
    try:
        searching = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
    except OSError as error:  # for lack of memory, say, which must not end the run
        return NewSchedule(None, f"the search can't be started ({(error.strerror or str(error)).lower()})")
    with searching as process:
        assert process.stdin and process.stdout
        try:
            process.stdin.write(document.dumps(document.to_dict(search_input), indent=None) + "\n")
            process.stdin.flush()
            answer = process.stdout.read()
        except BrokenPipeError:  # it has ended already
            answer = ""
    if not answer:
        return NewSchedule(None, f"the search was ended (exit code {process.returncode})")
    return document.from_dict(NewSchedule, document.parse_json(answer, "the search's answer"), "the search's answer")


def main() -> None:
    """The process that searches."""
    search_input = read_question(SearchInput)
    try:
        if search_input.arrivals and search_input.held.latency_bound_s is not None:
            result = best_for_arrivals(search_input.setting, search_input.held)
        else:
            result = best(search_input.setting, search_input.held, search_input.most)
    except (InputError, Infeasible) as error:
        result = NewSchedule(None, str(error))
    write_answer(result)


def best(setting: Setting, held: Schedule, most: int | None = None) -> NewSchedule:
    """The schedule to go on with where the ranks hold layers and caches for another, and if there is none, why: the
    best one that takes over in place, or, if that is better by more than `WORTH`, the best of all. `most` caps the
    sequences that one replica decodes at once.
    """
    from xcore.specs.change import takes_over_in_place
    from xcore.specs.schedule import ranks_needed
    from xscheduler.setting_search import infeasible_text, search_schedule
    from xscheduler.spaces import POLICIES
    from xsimulator.estimates import GROWING

    bound_s = held.latency_bound_s
    disaggregated = held.traits.disaggregated
    policies = tuple(name for name in POLICIES if TRAITS[name].disaggregated) if disaggregated else (held.policy,)

    grows = held.admission == "grow" and GROWING.issuperset(policies)  # of others the best that reserves then grows

    def search(fixed: dict[str, int], **options: Any) -> Any:
        options |= {"policies": policies, "fixed": {"replicas": held.replicas} | fixed}
        options |= {} if disaggregated else {"most_resident": most}  # WAA's memory fills up, whatever its batch
        options |= {"admission": ("grow",)} if grows else {}
        answer = search_schedule(setting, bound_s, bound=held.meaning, **options)
        return replace(answer, schedule=answer.schedule and _with_cache_of(held, answer.schedule))

    free = search({})
    if free.schedule is None:
        return NewSchedule(None, infeasible_text(free, bound_s))
    stays = free
    # A full memory is never of quite one size.
    if disaggregated and free.schedule.kv_blocks <= (1 + WORTH) * held.kv_blocks:
        blocks = min(free.schedule.kv_blocks, held.kv_blocks)
        stays = replace(free, schedule=replace(free.schedule, kv_blocks=blocks))
    if not takes_over_in_place(free.schedule, held) and not disaggregated:  # WAA's stages can't be asked for
        stays = search(_degrees(held), kv_blocks=held.kv_blocks * held.block_size // BLOCK_SIZE)
    need, have = ranks_needed(free.schedule), ranks_needed(held)
    if stays.schedule and takes_over_in_place(stays.schedule, held):
        rates = stays.estimate.throughput_tok_s, free.estimate.throughput_tok_s
        if need != have or rates[0] >= (1 - WORTH) * rates[1]:
            return NewSchedule(stays.schedule)
    if need != have:
        return NewSchedule(None, f"what is best for them is for {need} devices, and this job has {have}")
    return NewSchedule(free.schedule)


def best_for_arrivals(setting: Setting, held: Schedule) -> NewSchedule:
    """The schedule to go on with where requests arrive over time: of one device any policy's, of several a schedule of
    the same policy and replicas.
    """
    from xcore.specs.schedule import ranks_needed
    from xscheduler.highest_goodput import highest_goodput
    from xscheduler.spaces import POLICIES

    assert held.latency_bound_s is not None
    alone = ranks_needed(held) == 1
    policies = tuple(n for n in POLICIES if _keeps_cache_of(held, TRAITS[n])) if alone else (held.policy,)
    found = highest_goodput(
        setting, held.latency_bound_s, policies, {"replicas": held.replicas}, held.admission == "grow"
    )
    schedule = replace(_with_cache_of(held, found.schedule), latency_bound_s=held.latency_bound_s)
    if ranks_needed(schedule) != ranks_needed(held):
        need, have = ranks_needed(schedule), ranks_needed(held)
        return NewSchedule(None, f"what is best for them is for {need} devices, and this job has {have}")
    return NewSchedule(schedule)


def _with_cache_of(held: Schedule, schedule: Schedule) -> Schedule:
    """Return the schedule with the admission, prefix caching and block size that the run was started with."""
    blocks = schedule.kv_blocks * schedule.block_size // held.block_size
    return replace(
        schedule,
        kv_blocks=max(1, blocks),
        block_size=held.block_size,
        admission=held.admission,
        prefix_caching=held.prefix_caching,
    )


def _keeps_cache_of(held: Schedule, traits: Traits) -> bool:
    """Whether a policy of one device has the admission and prefix caching of the schedule that is held."""
    grows, caches = held.admission == "grow", held.prefix_caching
    return not traits.disaggregated and traits.grows >= grows and traits.caches_prefixes >= caches


def _degrees(held: Schedule) -> dict[str, int]:
    """The tensor parallelism of a schedule's stages, as a search is asked for it."""
    degree = max(stage.tp for stage in held.stages)
    grouped = sum(stage.tp for stage in held.stages if stage.tp > 1)
    return {"tp_degree": degree} | ({"tp_gpus": grouped} if grouped else {})
