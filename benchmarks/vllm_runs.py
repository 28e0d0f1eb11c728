"""Replays beside published runs of vLLM that nothing was fitted on: `python -m benchmarks.vllm_runs`.

(a) vLLM 0.11, Llama-3-8B on one H100 (`measured/inference_perf`), at seven rates in each of three settings: without
prefix caching, with more sequences, and with prefixes cached. Ten groups of ten prompts that begin with the same
hundred tokens are asked for again and again. Profiles are rooflines with the preset `vllm-0.11` and 13 ms of
front-end time, which was measured as the difference of the client's and the server's time to first token.

Rows whose achieved rate is below 0.98 of the requested one are left out: there the client is a closed loop. Rows within
a twentieth of the server's highest rate stand apart: there a queue grows or not by a few percent of speed. Its column
`time_per_output_token` is half the true value, so that the time per token is (latency − TTFT) / (output − 1), by the
client's count of output tokens; it asked for 64.

(b) vLLM 0.19, Qwen3-32B on two RTX PRO 6000 (`measured/llmservingsim2`): 300 requests, one by one, since each was
queued: without a front end.
"""

import argparse
import csv
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from xcore.duration import duration_text
from xcore.quantity import signed_percent
from xcore.specs.profile import Profile
from xcore.specs.request_times import RequestTimes, latencies
from xcore.specs.schedule import Schedule
from xcore.specs.workload import RequestLengths, Workload
from xcore.traces.prompt_identity import PromptIdentity
from xscheduler.engine_settings import EngineSettings, follow
from xscheduler.settings import Setting, find_setting
from xsimulator.replay.event_simulator import replay

DATA = Path(os.environ.get("EXEGPT_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
FILE = DATA / "measured" / "inference_perf" / "kubecon2025_llama3-8b_h100.csv"
REQUESTS = DATA / "measured" / "llmservingsim2" / "Qwen3-32B" / "requests.jsonl"
VARIANTS = {
    "vllm": EngineSettings.of({"max_num_seqs": 128, "max_num_batched_tokens": 8192, "admission": "grow"}),
    "vllm+batch_size": EngineSettings.of({"max_num_seqs": 192, "max_num_batched_tokens": 8192, "admission": "grow"}),
    "vllm+chunking_and_prefix_caching": EngineSettings.of(
        {"max_num_seqs": 128, "max_num_batched_tokens": 8192, "admission": "grow", "prefix_caching": True}
    ),
}
"""Each variant's flags; 8,192 tokens are vLLM 0.11's own on an H100."""
OUTPUT, GROUPS, PROMPTS, SHARED = 64, 10, 10, 100
"""Output tokens that were asked for; groups of prompts, prompts of each, and tokens that a group has in common."""
LEAST_ACHIEVED = 0.98
SATURATED = 0.95
"""Share of the highest rate that the variant achieved from which on a row counts as saturated."""
LIMITS = {"latency": 0.10, "time per token": 0.10, "TTFT": 0.25}
"""Relative errors that rows below saturation are not to exceed."""


@dataclass(frozen=True)
class Row:
    """A stage of the campaign, in seconds and requests per second."""

    variant: str
    rate: float
    achieved: float
    requests: int
    input: float
    output: float
    """Tokens by the client's count."""
    ttft_s: float
    latency_s: float
    saturated: bool = False
    """Return whether the rate is near the server's limit."""

    @property
    def figures(self) -> dict[str, float]:
        """Compared times in seconds."""
        per_token = (self.latency_s - self.ttft_s) / (self.output - 1)
        return {"latency": self.latency_s, "time per token": per_token, "TTFT": self.ttft_s}


def read_rows(path: Path = FILE) -> list[Row]:
    """Return the stages of the three variants that kept up with the requested rate."""
    with path.open() as file:
        rows = [_row(row) for row in csv.DictReader(file) if row["variant"] in VARIANTS]
    highest = {v: max(row.achieved * row.rate for row in rows if row.variant == v) for v in VARIANTS}
    kept = [row for row in rows if row.achieved >= LEAST_ACHIEVED]
    return [replace(row, saturated=row.rate > SATURATED * highest[row.variant]) for row in kept]


def _row(row: dict[str, str]) -> Row:
    rate = float(row["load_requested_rate"])
    return Row(
        row["variant"],
        rate,
        float(row["load_achieved_rate"]) / rate,
        int(row["successes"]),
        float(row["prompt_len_mean"]),
        float(row["output_len_mean"]),
        float(row["time_to_first_token_mean_s"]),
        float(row["request_latency_mean_s"]),
    )


def requests_of(row: Row, seed: int) -> list[RequestLengths]:
    """Draw a stage's requests: each is one of the prompts, of which the cache may have the whole text.

    They arrive at random within the stage: as many as the rate gives, whose achieved rates are within a thousandth.
    """
    rng, tokens = np.random.default_rng([seed, 7]), round(row.input)
    group, own = np.arange(SHARED), np.arange(SHARED, tokens)
    texts = [(*(group + tokens * g).tolist(), *(own + 10_000 * (1 + k)).tolist()) for g, k in _PLACES]
    drawn = rng.integers(len(texts), size=row.requests).tolist()
    arrivals = np.sort(rng.uniform(0.0, row.requests / row.rate, row.requests)).tolist()
    return [
        RequestLengths(tokens, OUTPUT, at, PromptIdentity(token_ids=texts[k]))
        for k, at in zip(drawn, arrivals, strict=True)
    ]


_PLACES = [(g, GROUPS * g + k) for g in range(GROUPS) for k in range(PROMPTS)]
"""Return each prompt's group and its number."""


def predicted(row: Row, schedule: Schedule, profile: Profile, seed: int) -> dict[str, float]:
    """Replay a stage's requests; returns the figures that are compared."""
    served = replay(schedule, profile, requests_of(row, seed), timeline=False).served
    return means(served)


def means(served: Sequence[RequestTimes]) -> dict[str, float]:
    """Return the mean figures of served requests since their arrival, in seconds."""
    columns = latencies(served, "arrival")
    return {name: float(columns[key].mean()) for name, key in zip(LIMITS, ("latency", "tpot", "ttft"), strict=True)}


def setting_of(engine: str = "vllm-0.11", front_end: str = "13ms") -> Setting:
    """Return the model of (a) on its device, by the roofline."""
    where = ("llama-3-8b", "1xH100-SXM", f"205/{OUTPUT}", "roofline")
    return find_setting(*where, engine=engine, front_end=front_end)


def request_by_request() -> tuple[dict[str, float], dict[str, float]]:
    """Return the measured and the predicted figures of (b)."""
    rows = [json.loads(line) for line in REQUESTS.read_text(encoding="utf-8").splitlines()]
    begin = rows[0]["queued_ts"]
    requests, measured = [], []
    for index, row in enumerate(rows):
        names = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
        at = [row[name] - begin for name in names]
        requests.append(RequestLengths(row["input_toks"], row["output_toks"], at[0]))
        measured.append(RequestTimes(index, row["input_toks"], row["output_toks"], *at))
    where = ("qwen3-32b", "2xRTXPRO6000", Workload.from_requests("run", requests), "roofline")
    setting = find_setting(*where, engine="vllm", front_end="0ms", one_by_one=True)
    flags = EngineSettings.of(
        {
            "max_num_seqs": 128,
            "max_num_batched_tokens": 2048,
            "tp_degree": 2,
            "admission": "grow",
            "prefix_caching": True,
        }
    )
    schedule, _ = follow(setting, flags)
    return means(measured), means(replay(schedule, setting.profile, requests, timeline=False).served)


def compare(measured: dict[str, float], figures: dict[str, float]) -> tuple[str, dict[str, float]]:
    """Return a table's cells, and the relative error of each figure."""
    errors = {name: figures[name] / value - 1 for name, value in measured.items()}
    pairs = [f"{duration_text(figures[name])} / {duration_text(value)}" for name, value in measured.items()]
    cells = zip(pairs, errors.values(), strict=True)
    return " ".join(f"{pair:>20} {signed_percent(error):>6}" for pair, error in cells), errors


def print_stages(seed: int) -> None:
    """Print the stages of (a), and the largest error of each figure."""
    setting = setting_of()
    worst = {saturated: dict.fromkeys(LIMITS, 0.0) for saturated in (False, True)}
    for row in read_rows():
        schedule, _ = follow(setting, VARIANTS[row.variant])
        cells, errors = compare(row.figures, predicted(row, schedule, setting.profile, seed))
        largest = worst[row.saturated]
        worst[row.saturated] = {name: max(largest[name], abs(error)) for name, error in errors.items()}
        print(f"{row.variant:34} {row.rate:7.1f} {cells}" + (" saturated" if row.saturated else ""))
    for saturated, errors in worst.items():
        texts = [f"{name} {signed_percent(errors[name])}" for name in LIMITS]
        print(f"largest errors of rows {'near saturation' if saturated else 'below it'}: {', '.join(texts)}")


def main() -> None:
    """Print predicted beside measured figures of both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and prompts")
    seed = parser.parse_args().seed
    print(f"{'predicted / measured':34} {'rate/s':>7}" + "".join(f" {name:>27}" for name in LIMITS))
    if FILE.exists():
        print("(a) vLLM 0.11, Llama-3-8B on one H100, engine vllm-0.11, front end 13 ms")
        print_stages(seed)
    if REQUESTS.exists():
        print("(b) vLLM 0.19, Qwen3-32B on two RTX PRO 6000, engine vllm")
        print(f"{'300 requests':42} {compare(*request_by_request())[0]}")
    for path in (FILE, REQUESTS):
        if not path.exists():
            print(f"skipped: there is no file {path} (EXEGPT_DATA)")


if __name__ == "__main__":
    main()
