"""`demo`: create, profile, tune and run a small model, and compare predictions with measurements."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from exegpt.api.compare import compare_policies
from exegpt.api.reports import write_run_report
from exegpt.options.demo import DemoOptions
from xcore import document
from xcore.choices import check_columns
from xcore.columns import parse_columns
from xcore.console import output
from xcore.console.comparison import Comparison
from xcore.errors import InputError
from xcore.requests.request import Request
from xcore.requests.request_lists import draw
from xcore.requests.requests import random_requests
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import Schedule
from xcore.specs.timeline import chrome_trace
from xcore.traces.trace import parse_workload
from xprofiler import store
from xprofiler.measure import measure_profile
from xrunner.comm.ranks import Ranks
from xrunner.models import attention_planning
from xrunner.models.create import create_model
from xrunner.models.device import find_device
from xrunner.models.weights import products_text
from xscheduler.list_search import tune_list
from xscheduler.search_problem import Limits
from xscheduler.setting_search import frontier_bounds, ranked, search_schedule
from xscheduler.settings import Setting, find_setting, run_dtype
from xscheduler.spaces import POLICIES
from xsimulator.replay.event_simulator import replay

if TYPE_CHECKING:
    import torch

    from xscheduler.tuned import Tuned

BUDGET_S = 75.0
"""Predicted time of all runs in seconds, in the steady state, which determines the number of requests."""
LEAST, MOST = 32, 1024
"""Minimum number of requests, on however slow a machine, and maximum number."""
PLACES = (1 / 3, 1 / 2, 2 / 3, 1 / 5, 4 / 5)
"""Positions of the bounds to try: shares, by factors, of the way from the lowest latency to the unbounded one."""
ROOM = 0.06
"""Share of the bound that the demo's plan keeps as a margin, because the speed of a shared machine varies."""


@dataclass(frozen=True)
class DemoPlan:
    """The plan of the demo: a bound, requests that keep all policies busy for about a minute, and their schedules."""

    bound_s: float | None
    answer: "Tuned"
    """The answer for these requests."""
    requests: tuple[Request, ...]

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """The answer's schedule first, then the other policies' schedules by falling throughput."""
        return tuple(a.schedule for a in ranked(self.answer) if a.schedule and a.estimate)


@dataclass(frozen=True)
class Demo:
    """The model on its device, the answers of the searches, and the plan of the runs."""

    directory: Path
    model: Path
    device: "torch.device"
    attention: str
    setting: Setting
    frontier: "tuple[Tuned, ...]"
    plan: DemoPlan


def prepare(options: DemoOptions) -> Demo:
    """Create the model, measure it and search schedules."""
    device, workload = find_device(options.device), options.trace or options.workload or "T"
    if options.trace and options.workload:
        raise InputError(
            f"--trace '{options.trace}' and --workload '{options.workload}' both give lengths: leave one of them out."
        )
    check_columns(options.columns, options.trace, options.workload)
    parse_workload(workload, parse_columns(options.columns) if options.columns else None)  # before minutes of work
    options.directory.mkdir(parents=True, exist_ok=True)
    model = create_demo_model(options.directory, options.seed)
    spec = ModelSpec.from_directory(model)
    dtype = run_dtype(options.dtype, None, spec, device.type)
    attention, why = attention_planning.choose_attention(options.attention, spec, dtype, device)
    output.notes((*why, *products_text(dtype, device.type == "cpu")))
    setting = _setting(model, workload, options.columns, device, dtype, attention)
    output.notes(setting.assumptions)
    frontier = search_frontier(setting)
    plan = make_plan(setting, options.bounds_s or places(frontier), options.num, options.seed)
    return Demo(options.directory, model, device, attention, setting, frontier, plan)


def run(demo: Demo) -> list[Comparison]:
    """Run the requests under each schedule, and write schedule.json, report.html and trace.json."""
    plan, directory = demo.plan, demo.directory
    where = (Ranks(), demo.device, demo.attention)
    comparisons = compare_policies(demo.model, plan.schedules, demo.setting, plan.requests, 1, *where)
    best = comparisons[0]
    document.write(directory / "schedule.json", plan.answer.schedule)
    title = "exegpt demo: predicted and measured"
    write_run_report(directory / "report.html", title, demo.setting, comparisons, demo.frontier, plan.answer)
    timelines = [best.predicted_timeline, best.measured_timeline]
    document.write_text(directory / "trace.json", document.dumps(chrome_trace(timelines), indent=None))
    return comparisons


def create_demo_model(directory: Path, seed: int) -> Path:
    """Return the demo's model, which is created unless an earlier demo has created it."""
    path = directory / f"model-{seed}"
    if not path.is_dir():
        output.note("1. Creating a model: Llama with 8 layers and 56 million random weights …")
        create_model(
            path,
            arch="llama",
            layers=8,
            hidden=512,
            heads=8,
            kv_heads=4,
            ffn=1408,
            vocab=32000,
            context=1024,
            dtype="fp32",
            seed=seed,
            shards=1,
            merges=True,
        )
    return path


def _setting(
    model: Path, workload: str, columns: str | None, device: "torch.device", dtype: str, attention: str
) -> Setting:
    """Return the setting with the model on this machine's device and a measured profile, stored or new."""
    spec = ModelSpec.from_directory(model)
    if store.find(spec, dtype, store.facts(device, attention=attention)) is None:
        output.note("2. Measuring its layers on this machine …")
        with output.progress("measuring layers") as progress:
            measure_profile(model, dtype, lambda _, done, total: progress(done, total), device, attention=attention)
    else:
        output.note("2. Its layers were measured on this machine before.")
    return find_setting(
        str(model),
        "local",
        workload,
        dtype=dtype,
        columns=columns,
        scale_to_context=True,
        device=device.type,
        attention=attention,
    )


def search_frontier(setting: Setting) -> "tuple[Tuned, ...]":
    """Return the answers under bounds from the lowest reachable latency upwards."""
    return tuple(search_schedule(setting, bound_s, lowest_latency=True) for bound_s in frontier_bounds(setting))


def places(frontier: "Sequence[Tuned]") -> tuple[float | None, ...]:
    """Return bounds from the lowest reachable latency to the latency of the unbounded optimum, to two digits."""
    last = frontier[-1]
    if last.estimate is None or last.estimate.latency_s is None or last.lowest_latency_s is None:
        return (None,)
    low, high = last.lowest_latency_s, last.estimate.latency_s
    return tuple(float(f"{low * max(1.0, high / low) ** place:.2g}") for place in PLACES)


def make_plan(setting: Setting, bounds_s: Sequence[float | None], num: int | None, seed: int) -> DemoPlan:
    """Return the plan for the first bound that the replay of its requests keeps with a margin.

    If there is no such bound, return the plan for the first one.
    """
    plans: list[DemoPlan] = []
    for bound_s in bounds_s:
        tight_s = bound_s and bound_s / (1 + ROOM)
        steady = search_schedule(setting, tight_s)
        requests = _requests(setting, [a.schedule for a in steady.alternatives if a.schedule], num, seed)
        answer = tune_list(
            setting, steady, [request.lengths for request in requests], Limits(tight_s), policies=POLICIES
        )
        plan = DemoPlan(bound_s, _under(answer, bound_s), tuple(requests))
        if answer.estimate and (answer.estimate.latency_s or 0.0) <= (tight_s or math.inf):
            return plan
        plans.append(plan)
    return plans[0]


def _under(answer: "Tuned", bound_s: float | None) -> "Tuned":
    """Return the answer with its schedules under this bound, which is looser than the bound of the search."""

    def loosened(schedule: Schedule | None) -> Schedule | None:
        return schedule and replace(schedule, latency_bound_s=bound_s)

    alternatives = tuple(replace(a, schedule=loosened(a.schedule)) for a in answer.alternatives)
    return replace(answer, schedule=loosened(answer.schedule), alternatives=alternatives)


def _requests(setting: Setting, schedules: Sequence[Schedule], num: int | None, seed: int) -> list[Request]:
    """Return requests with the workload's lengths.

    There are `num`, or as many as all schedules together serve in the demo's time.
    """
    longest = setting.model.longest_request
    if num is None:
        sample = draw(setting.workload, 128, seed, longest)
        expected = sum(replay(schedule, setting.profile, sample, timeline=False).seconds for schedule in schedules)
        num = min(MOST, max(LEAST, round(len(sample) * BUDGET_S / expected))) if expected else LEAST
    return random_requests(draw(setting.workload, num, seed, longest), setting.model.vocab, seed)
