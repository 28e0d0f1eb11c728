"""Search again during a run, for the lengths that its requests turn out to have."""

import subprocess
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from xcore import document
from xcore.errors import Infeasible, InputError
from xcore.policies import TRAITS, Traits
from xcore.quantity import figure_text
from xcore.searching import process_text, read_problem, write_answer
from xcore.specs.schedule import BLOCK_SIZE, Schedule
from xcore.specs.workload import Workload
from xscheduler.settings import Setting

if TYPE_CHECKING:
    from xcore.specs.change import Reschedule
    from xscheduler.tuned import Tuned

WORTH = 0.1
"""Share of the throughput that other layers or a larger cache must gain: all requests wait during such a change."""
_PROCESS = process_text("xscheduler.reschedule")


@dataclass(frozen=True)
class SearchInput:
    """The arguments of `best`."""

    setting: Setting
    held: Schedule
    most: int | None
    arrivals: bool = False
    """Whether requests arrive over time: then the search maximizes goodput instead of throughput."""


class NewSchedule(NamedTuple):
    """A schedule, or the reason why there is none."""

    schedule: Schedule | None
    why_not: str = ""


def rescheduler(setting: Setting, arrivals: bool = False) -> "Reschedule":
    """Return a function that repeats the search for the running schedule.

    It keeps the policy (for WAA, either variant), the bound, the devices and the replicas. It prints the new lengths
    and the result on standard error.
    """
    from xcore.console import output
    from xcore.console.schedule_text import schedule_text

    most = len(setting.workload.requests or ()) or None  # no batch is larger than the list of requests

    def reschedule(workload: Workload, held: Schedule) -> Schedule | None:
        means = [figure_text(distribution.mean, 4) for distribution in (workload.input, workload.output)]
        note = f"lengths have changed to {means[0]} input and {means[1]} output tokens on average"
        output.note(f"{note}: searching for another schedule")
        schedule, why_not = in_a_process(SearchInput(replace(setting, workload=workload), held, most, arrivals))
        output.note(f"found: {schedule_text(schedule)}" if schedule else f"the run keeps its schedule: {why_not}")
        return schedule

    return reschedule


def in_a_process(search_input: SearchInput) -> NewSchedule:
    """Run `best` in a separate process and return its result.

    A thread would compete with the run and make it several times slower. Problem and answer are JSON on standard input
    and output. The process ends when its standard input closes, which is also when the run ends.
    """
    command = [sys.executable, "-c", _PROCESS, *sys.path]
    try:
        searching = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
    except OSError as error:  # for example, too little memory, which must not end the run
        return NewSchedule(None, f"the search could not be started ({(error.strerror or str(error)).lower()})")
    with searching as process:
        assert process.stdin and process.stdout
        try:
            process.stdin.write(document.dumps(document.to_dict(search_input), indent=None) + "\n")
            process.stdin.flush()
            answer = process.stdout.read()
        except BrokenPipeError:  # the process has already ended
            answer = ""
    if not answer:
        return NewSchedule(None, f"the search was ended (exit code {process.returncode})")
    return document.from_dict(NewSchedule, document.parse_json(answer, "the search's answer"), "the search's answer")


def main() -> None:
    """Run the search of this process."""
    search_input = read_problem(SearchInput)
    try:
        if search_input.arrivals and search_input.held.latency_bound_s is not None:
            result = best_for_arrivals(search_input.setting, search_input.held)
        else:
            result = best(search_input.setting, search_input.held, search_input.most)
    except (InputError, Infeasible) as error:
        result = NewSchedule(None, str(error))
    write_answer(result)


def best(setting: Setting, held: Schedule, most: int | None = None) -> NewSchedule:
    """Return the schedule with which the ranks of `held` continue, or the reason why there is none.

    This is the best schedule that takes over in place or, if better by more than `WORTH`, the best of all. The ranks
    already hold layers and caches for `held`. `most` caps the sequences that one replica decodes at a time.
    """
    from xcore.specs.change import takes_over_in_place
    from xcore.specs.schedule import ranks_needed
    from xscheduler.setting_search import infeasible_text, search_schedule
    from xscheduler.spaces import POLICIES
    from xsimulator.estimates import GROWING

    bound_s = held.latency_bound_s
    disaggregated = held.traits.disaggregated
    policies = tuple(name for name in POLICIES if TRAITS[name].disaggregated) if disaggregated else (held.policy,)

    grows = held.admission == "grow" and GROWING.issuperset(policies)  # else: the best that reserves then grows

    def search(fixed: dict[str, int], kv_blocks: int | None = None) -> "Tuned":
        answer = search_schedule(
            setting,
            bound_s,
            bound=held.meaning,
            policies=policies,
            fixed={"replicas": held.replicas} | fixed,
            most_resident=None if disaggregated else most,  # WAA fills its memory with any batch
            kv_blocks=kv_blocks,
            admission=("grow",) if grows else ("reserve",),
        )
        return replace(answer, schedule=answer.schedule and _with_cache_of(held, answer.schedule))

    free = search({})
    if free.schedule is None:
        return NewSchedule(None, infeasible_text(free, bound_s))
    stays = free
    # Sizes of a full KV pool differ a little between searches.
    if disaggregated and free.schedule.kv_blocks <= (1 + WORTH) * held.kv_blocks:
        blocks = min(free.schedule.kv_blocks, held.kv_blocks)
        stays = replace(free, schedule=replace(free.schedule, kv_blocks=blocks))
    if not takes_over_in_place(free.schedule, held) and not disaggregated:  # a search can't fix WAA's stages
        stays = search(_degrees(held), kv_blocks=held.kv_blocks * held.block_size // BLOCK_SIZE)
    need, have = ranks_needed(free.schedule), ranks_needed(held)
    if stays.schedule and stays.estimate and free.estimate and takes_over_in_place(stays.schedule, held):
        rates = stays.estimate.throughput_tok_s, free.estimate.throughput_tok_s
        if need != have or rates[0] >= (1 - WORTH) * rates[1]:
            return NewSchedule(stays.schedule)
    if need != have:
        return NewSchedule(None, f"the best schedule for the new lengths needs {need} devices, but this run has {have}")
    return NewSchedule(free.schedule)


def best_for_arrivals(setting: Setting, held: Schedule) -> NewSchedule:
    """Return the schedule with which a run continues if requests arrive over time.

    On one device it may have any policy; on several it keeps the policy and the number of replicas.
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
        return NewSchedule(None, f"the best schedule for the new lengths needs {need} devices, but this run has {have}")
    return NewSchedule(schedule)


def _with_cache_of(held: Schedule, schedule: Schedule) -> Schedule:
    """Return the schedule with the cache's settings and the adjustment that the run was started with."""
    blocks = schedule.kv_blocks * schedule.block_size // held.block_size
    return replace(
        schedule,
        kv_blocks=max(1, blocks),
        block_size=held.block_size,
        admission=held.admission,
        prefix_caching=held.prefix_caching,
        adjust=held.adjust if held.traits.adjustable and schedule.traits.adjustable else schedule.adjust,
    )


def _keeps_cache_of(held: Schedule, traits: Traits) -> bool:
    """Return whether a policy of one device supports the admission and the prefix caching of `held`."""
    grows, caches = held.admission == "grow", held.prefix_caching
    return not traits.disaggregated and traits.grows >= grows and traits.caches_prefixes >= caches


def _degrees(held: Schedule) -> dict[str, int]:
    """Return the tensor parallelism of a schedule's stages as arguments of a search."""
    degree = max(stage.tp for stage in held.stages)
    grouped = sum(stage.tp for stage in held.stages if stage.tp > 1)
    return {"tp_degree": degree} | ({"tp_gpus": grouped} if grouped else {})
