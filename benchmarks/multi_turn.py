"""Multi-turn conversations in a closed loop, beside a published campaign: `python -m benchmarks.multi_turn`.

vLLM 0.15, Llama-3.3-70B in NVFP4 with keys and values in fp8 on two and four B200, 16 and 512 clients
(`measured/inferencex`, the four runs without KV offloading). Each client sends its next turn when the last one has
ended, after the time that the client itself took (some 8 ms). Nothing is fitted to these runs: the profile is the
roofline with engine `vllm` and the attention kernel of the command, the settings and the KV blocks are those of the
server's command and log.

The client counts the tokens of the messages alone. The server saw them in Llama 3.3's chat template, whose default
system message and headers are counted here: 26 tokens that all prompts have in common, 5 for each message, and 4 that
ask for the answer.

The time of a request outside the engine (chat template, HTTP, the client) is measured in a fifth run of the campaign,
of 32 clients on four B200 with KV offloading: its median time to first token less the predicted one. `--front-end`
sets it instead (`7ms` is the engine's own). `--cache 1/2,1/4` replays with a part of the cache, and prints
the hits of an LRU cache of as many blocks, which gets the turns at the times of the replay.
"""

import argparse
import csv
import gzip
import os
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np

from benchmarks.vllm_runs import means
from xcore.duration import duration_text, parse_delay
from xcore.quantity import percent_text, signed_percent
from xcore.specs.engine_spec import find_engine
from xcore.specs.profile import Profile
from xcore.specs.request_times import RequestTimes
from xcore.specs.schedule import Schedule
from xcore.specs.workload import RequestLengths, Workload
from xcore.traces.prefixes import Prefixes
from xcore.traces.prompt_identity import PromptIdentity
from xprofiler.roofline import roofline_profile
from xscheduler.engine_settings import EngineSettings, follow
from xscheduler.settings import find_setting
from xsimulator.replay.dependent_requests import After, replay_dependent
from xsimulator.replay.event_simulator import Replay

DATA = Path(os.environ.get("EXEGPT_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
REQUESTS = DATA / "measured" / "inferencex" / "multiturn_llama70b_fp4_b200_vllm_requests.csv.gz"
RUNS = REQUESTS.with_name("multiturn_llama70b_fp4_b200_vllm_runs.csv")
SYSTEM, MESSAGE, ANSWER = 26, 5, 4
"""Tokens of Llama 3.3's chat template: its system message, a message's header and end, the header of the answer."""
FIFTH = "tp4_bs32_offloadon"
"""The run that gives the time outside the engine; its offloaded blocks were hardly found (0.02 % of the tokens)."""
BUDGET, MEMORY = 8192, 0.9
"""Tokens of an iteration, and the share of the memory, in the server's command."""
FLASHINFER_KV8_RATE = 0.37
"""Share of the rate of 16-bit keys and values at which FlashInfer's own decoding kernel reads 8-bit ones on a B200.

The server's command excludes TensorRT-LLM's kernels, which engine `vllm` has. In the tables of aiconfigurator 0.12.0
(SGLang 0.5.14, kernel `flashinfer`, from 250 MB on) this kernel reads 2.6 TB/s, TensorRT-LLM's 5.8.
"""
LIMITS = {"TTFT": 0.25, "time per token": 0.10, "latency": 0.10}
"""Relative errors that issue 36 allows."""
HIT_POINTS = 0.02
"""Error of the hit rate that it allows."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run of the campaign; times are means in seconds."""

    name: str
    tp: int
    clients: int
    kv_tokens: int
    times: dict[str, float]
    median_ttft_s: float
    hit_rate: float
    turns: tuple[RequestLengths, ...]
    after: tuple[After | None, ...]


def read_runs(offload: str = "off") -> list[MeasuredRun]:
    """Return the runs whose server had the devices alone: those without KV offloading, or with it."""
    with RUNS.open() as file:
        rows = [row for row in csv.DictReader(file) if row["offload"] == offload and "one server" in row["server_log"]]
    turns = defaultdict(list)
    with gzip.open(REQUESTS, "rt") as file:
        for row in csv.DictReader(file):
            turns[row["run"]].append(row)
    return [_run(row, turns[row["exp_name"]]) for row in rows]


def _run(row: dict[str, str], turns: list[dict[str, str]]) -> MeasuredRun:
    turns.sort(key=lambda turn: float(turn["start_time_ms"]))
    columns = {"TTFT": "ttft_ms", "time per token": "tpot_ms", "latency": "latency_ms"}
    return MeasuredRun(
        row["exp_name"],
        int(row["tp"]),
        int(row["bs"]),
        int(row["kv_tokens"].replace(",", "")),
        {name: float(row[f"mean_{column}"]) / 1e3 for name, column in columns.items()},
        float(row["p50_ttft_ms"]) / 1e3,
        float(row["gpu_hit_rate"]) / 100,
        tuple(_turn(turn) for turn in turns),
        tuple(_after(turns)),
    )


def _turn(row: dict[str, str]) -> RequestLengths:
    """Return a turn as the server saw it."""
    tokens = int(row["input_num_tokens"]) + SYSTEM + MESSAGE * int(row["input_num_turns"]) + ANSWER
    identity = PromptIdentity(prefix="system", prefix_tokens=SYSTEM, conversation=row["conversation_id"])
    return RequestLengths(tokens, max(1, int(row["output_num_tokens"])), 0.0, identity)


def _after(rows: Iterable[dict[str, str]]) -> Iterable[After | None]:
    """Yield the turn of the same client that each turn follows, and the client's seconds in between."""
    last: dict[str, tuple[int, float]] = {}
    for place, row in enumerate(rows):
        start_s, before = float(row["start_time_ms"]) / 1e3, last.get(row["client_id"])
        yield None if before is None else After(before[0], start_s - before[1])
        last[row["client_id"]] = place, start_s + float(row["latency_ms"]) / 1e3


def server_of(run: MeasuredRun, front_end_s: float) -> tuple[Schedule, Profile]:
    """Return the server's schedule, and its profile by the data sheet with this time outside the engine."""
    setting = find_setting(
        "llama-3.3-70b",
        f"{run.tp}xB200",
        Workload.from_requests(run.name, run.turns),
        "roofline",
        dtype="nvfp4",
        kv_dtype="fp8",
        memory_fraction=MEMORY,
        engine="vllm",
        one_by_one=True,
    )
    engine = replace(find_engine("vllm"), kv8_rate=FLASHINFER_KV8_RATE)
    profile = roofline_profile(setting.model, setting.cluster, "nvfp4", (run.tp,), kv_dtype="fp8", engine=engine)
    setting = replace(setting, profile=replace(profile, front_end_s=front_end_s))
    flags = {"max_num_seqs": run.clients, "max_num_batched_tokens": BUDGET, "tp_degree": run.tp, "admission": "grow"}
    schedule, _ = follow(setting, EngineSettings.of(flags | {"prefix_caching": True, "kv_blocks": run.kv_tokens // 16}))
    return schedule, setting.profile


def hit_rate(served: Sequence[RequestTimes]) -> float:
    """Return the share of the prompts' tokens that were found in the cache."""
    return sum(each.cached_tokens for each in served) / sum(each.input_tokens for each in served)


def lru_hit_rate(turns: Sequence[RequestLengths], served: Sequence[RequestTimes], blocks: int, size: int) -> float:
    """Return the hit rate of a cache that forgets the least recently used block that no running turn holds.

    A turn looks its prompt up when it starts, and gets a block whenever its tokens fill one; `served` has these times.
    """
    prefixes, free, held, found = Prefixes.of(turns, size), OrderedDict[int, None](), Counter[int](), 0
    assert prefixes, "all turns have identities"
    keys = [prefixes.keys(place, turn.input + turn.output - 1, size) for place, turn in enumerate(turns)]
    for _, kind, place, block in sorted(event for times in served for event in _events(times, keys[times.index], size)):
        own, prompt = keys[place], turns[place].input // size
        if kind == _FINISH:
            for key in reversed(own):
                held[key] -= 1
                if not held[key]:
                    del held[key]
                    free[key] = None
            continue
        if kind == _START:
            most = (turns[place].input - 1) // size
            found += next((number for number, key in enumerate(own[:most]) if key not in free and not held[key]), most)
        for key in own[:prompt] if kind == _START else own[block : block + 1]:
            held[key] += 1
            free.pop(key, None)
        while free and len(free) + len(held) > blocks:
            free.popitem(last=False)
    return found * size / sum(turn.input for turn in turns)


_FINISH, _START, _GROW = range(3)


def _events(times: RequestTimes, keys: Sequence[int], size: int) -> Iterator[tuple[float, int, int, int]]:
    """Yield a turn's events: time, kind, turn and, when its tokens fill a block, the block's number."""
    yield times.start_s, _START, times.index, 0
    per_token_s = (times.finish_s - times.first_token_s) / max(times.output_tokens - 1, 1)
    for block in range(times.input_tokens // size, len(keys)):
        tokens = (block + 1) * size - times.input_tokens
        yield times.first_token_s + tokens * per_token_s, _GROW, times.index, block
    yield times.finish_s + 1e-9, _FINISH, times.index, 0


def front_end_of_fifth() -> float:
    """Return the seconds outside the engine in the fifth run: what its predicted median time to first token lacks."""
    (fifth,) = (run for run in read_runs("on") if run.name == FIFTH)
    schedule, profile = server_of(fifth, 0.0)
    served = replay_dependent(schedule, profile, fifth.turns, fifth.after).served
    return fifth.median_ttft_s - float(np.median([each.first_token_s - each.arrival_s for each in served]))


def compare(run: MeasuredRun, front_end_s: float) -> tuple[Replay, dict[str, float]]:
    """Replay a run; return the replay, and the relative error of each mean time."""
    schedule, profile = server_of(run, front_end_s)
    replayed = replay_dependent(schedule, profile, run.turns, run.after)
    figures = means(replayed.served)
    return replayed, {name: figures[name] / measured - 1 for name, measured in run.times.items()}


def print_cache(run: MeasuredRun, shares: Sequence[Fraction], front_end_s: float) -> None:
    """Print the hit rates with parts of the cache, in the replay and of an LRU cache."""
    schedule, profile = server_of(run, front_end_s)
    for share in shares:
        blocks = int(schedule.kv_blocks * share)
        part = replace(schedule, kv_blocks=blocks)
        served = replay_dependent(part, profile, run.turns, run.after).served
        alone = lru_hit_rate(run.turns, served, blocks, schedule.block_size)
        texts = percent_text(hit_rate(served)), percent_text(alone)
        print(f"{run.name:20} {share!s:>5} of the cache: {texts[0]} in the replay, {texts[1]} LRU", flush=True)


def main() -> None:
    """Print measured beside predicted figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--front-end", help="time outside the engine, like 7ms; default: that of a fifth run")
    parser.add_argument("--cache", default="", help="parts of the cache, like 1/2,1/4")
    asked = parser.parse_args()
    if not REQUESTS.exists():
        print(f"skipped: there is no file {REQUESTS} (EXEGPT_DATA)")
        return
    front_end_s = parse_delay(asked.front_end, "--front-end") if asked.front_end else front_end_of_fifth()
    print(f"time of a request outside the engine: {duration_text(front_end_s)}")
    print(f"{'predicted / measured':20}" + "".join(f" {name:>27}" for name in LIMITS) + f" {'hit rate':>22}")
    for run in read_runs():
        replayed, errors = compare(run, front_end_s)
        figures = means(replayed.served)
        cells = [
            f"{duration_text(figures[name])} / {duration_text(value)} {signed_percent(errors[name]):>6}"
            for name, value in run.times.items()
        ]
        rate = hit_rate(replayed.served)
        hits = f"{rate:.1%} / {run.hit_rate:.1%} {100 * (rate - run.hit_rate):+.1f} points"
        print(f"{run.name:20}" + "".join(f" {cell:>27}" for cell in cells) + f"  {hits}", flush=True)
    for run in read_runs():
        print_cache(run, [Fraction(text) for text in asked.cache.split(",") if text], front_end_s)


if __name__ == "__main__":
    main()
