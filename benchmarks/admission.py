"""Admission by *reserve* and by *grow* where outputs are unknown: `max_tokens` is four times what a request makes
before its stop token. Measured and predicted, with a cache of a half and of an eighth of what the batch reserves.

    python -m benchmarks.admission
"""

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from exegpt.api.compare import execute
from exegpt.api.demo import create_demo_model
from xcore.batching.admission import most_cached
from xcore.requests.request import Request
from xcore.requests.requests import random_requests
from xcore.specs.schedule import BLOCK_SIZE, Schedule
from xcore.specs.workload import RequestLengths
from xprofiler import machine, store
from xprofiler.measure import measure_profile
from xrunner.core.engine import Engine
from xrunner.models import Model, load_model
from xrunner.threads import set_threads
from xscheduler.engine_settings import engine_schedule
from xscheduler.settings import Setting, find_setting

CAP = 4
"""`max_tokens` over the output's length."""
SHARES = (2, 8)
"""The cache is what the batch reserves, divided by these."""
RESIDENTS = 32
INPUTS, OUTPUTS = (16, 160), (16, 80)


@dataclass(frozen=True)
class Row:
    """One rule with one cache: a run beside its replay."""

    rule: str
    kv_blocks: int
    measured_tok_s: float
    predicted_tok_s: float
    preemptions: int
    predicted_preemptions: int


def stopping(model: Model, schedule: Schedule, number: int, seed: int) -> tuple[Model, list[Request]]:
    """A model with stop tokens, and requests that they end after a fourth of what these may make.

    Greedy tokens don't depend on the batch, so a first run finds where each request comes to a stop token.
    """
    import random

    draw = random.Random(seed)
    lengths = [RequestLengths(draw.randint(*INPUTS), OUTPUTS[1]) for _ in range(number)]
    requests = random_requests(lengths, model.spec.vocab, seed)
    outputs = {result.id: result.output_ids for result in Engine(model, schedule).run(requests).results}
    stops = {outputs[request.id][draw.randint(*OUTPUTS) - 1] for request in requests}
    ended = []
    for request in requests:
        places = [i for i, token in enumerate(outputs[request.id]) if token in stops]
        ended.append(replace(request, max_tokens=CAP * (places[0] + 1), ignore_eos=False))
    return replace(model, eos=frozenset(stops)), ended


def rows(model: Model, setting: Setting, number: int, runs: int, seed: int) -> list[Row]:
    """Both rules with every cache, in turns; the run of median throughput of each."""
    roomy = engine_schedule(setting, "chunked", 1, None, BLOCK_SIZE, max_num_seqs=RESIDENTS, max_num_batched_tokens=256)
    ending, requests = stopping(model, roomy, number, seed)
    reserved = [-(-most_cached(len(r.prompt_ids), r.max_tokens, False) // BLOCK_SIZE) for r in requests]
    mean = sum(reserved) / len(reserved)
    cells = [
        replace(roomy, kv_blocks=max(max(reserved), int(RESIDENTS * mean / share)), admission=rule)
        for share in SHARES
        for rule in ("reserve", "grow")
    ]
    done = [[execute(ending, cell, setting.profile, requests) for cell in cells] for _ in range(runs)]
    medians = [
        sorted(column, key=lambda comparison: comparison.seconds)[runs // 2] for column in zip(*done, strict=True)
    ]
    return [
        Row(
            comparison.schedule.admission,
            comparison.schedule.kv_blocks,
            comparison.measured.throughput_tok_s,
            comparison.predicted.throughput_tok_s,
            comparison.preemptions,
            comparison.predicted_preemptions,
        )
        for comparison in medians
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=Path("exegpt-demo"), help="where the demo's model is")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    set_threads(arguments.threads)
    directory = create_demo_model(arguments.dir, 0)
    setting = find_setting(str(directory), "local", "100/50", None)
    if store.find(setting.model, "fp32", machine.provenance()) is None:
        print("measuring the model's layers", file=sys.stderr)
        measure_profile(directory)
        setting = find_setting(str(directory), "local", "100/50", None)
    table = rows(load_model(directory), setting, arguments.requests, arguments.runs, arguments.seed)
    if arguments.json:
        return print(json.dumps([vars(row) for row in table]))
    names = ("admission", "blocks", "tok/s", "predicted", "error", "preempted", "predicted")
    print("{:10} {:>7} {:>7} {:>10} {:>7} {:>10} {:>10}".format(*names))
    for row in table:
        error = (row.measured_tok_s - row.predicted_tok_s) / row.measured_tok_s
        figures = f"{row.kv_blocks:7,} {row.measured_tok_s:7,.0f} {row.predicted_tok_s:10,.0f} {error:+7.1%}"
        print(f"{row.rule:10} {figures} {row.preemptions:10,} {row.predicted_preemptions:10,}")
    for reserve, grow in zip(table[::2], table[1::2], strict=True):
        print(f"{reserve.kv_blocks:,} blocks: grow {grow.measured_tok_s / reserve.measured_tok_s:.2f} times reserve")


if __name__ == "__main__":
    main()
