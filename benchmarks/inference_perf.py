"""Replays beside a public vLLM 0.11 campaign: `python -m benchmarks.inference_perf`.

Llama-3-8B on one H100, at seven rates in each of three settings: without prefix caching, with more sequences, and with
prefixes cached. Ten groups of ten prompts that begin with the same hundred tokens are asked for again and again.
Profiles are rooflines with the preset `vllm-0.11` and 13 ms of front-end time, which was measured as the difference of
the client's and the server's time to first token. Nothing is fitted to these rows.

Rows whose achieved rate is below 0.98 of the requested one are left out: there the client is a closed loop. Rows within
a twentieth of the server's highest rate stand apart: there a queue grows or not by a few percent of speed. Its column
`time_per_output_token` is half the true value, so that the time per token is (latency − TTFT) / (output − 1), by the
client's count of output tokens; it asked for 64.
"""

import argparse
import csv
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from exegpt.app.engine_settings import EngineSettings, follow
from exegpt.app.settings import Setting, find_setting
from exegpt.duration import duration_text
from exegpt.profile import Profile
from exegpt.prompt_identity import PromptIdentity
from exegpt.quantity import signed_percent
from exegpt.schedule import Schedule
from exegpt.workload import RequestLengths
from xsimulator.replay.event_simulator import replay

DATA = Path(os.environ.get("EXEGPT_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
FILE = DATA / "measured" / "inference_perf" / "kubecon2025_llama3-8b_h100.csv"
VARIANTS = {
    "vllm": EngineSettings(max_num_seqs=128, max_num_batched_tokens=8192, admission="grow"),
    "vllm+batch_size": EngineSettings(max_num_seqs=192, max_num_batched_tokens=8192, admission="grow"),
    "vllm+chunking_and_prefix_caching": EngineSettings(
        max_num_seqs=128, max_num_batched_tokens=8192, admission="grow", prefix_caching=True
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
    """Whether the rate is about what the server can do."""

    @property
    def figures(self) -> dict[str, float]:
        """What is compared, in seconds."""
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
"""Each prompt's group, and its number."""


def predicted(row: Row, schedule: Schedule, profile: Profile, seed: int) -> dict[str, float]:
    """Replay a stage's requests; returns the figures that are compared."""
    served = replay(schedule, profile, requests_of(row, seed), timeline=False).served
    latency = float(np.mean([s.finish_s - s.arrival_s for s in served]))
    ttft = float(np.mean([s.first_token_s - s.arrival_s for s in served]))
    return {"latency": latency, "time per token": (latency - ttft) / (OUTPUT - 1), "TTFT": ttft}


def setting_of(engine: str = "vllm-0.11", front_end: str = "13ms") -> Setting:
    """Return the model on its device, by the roofline."""
    where = ("llama-3-8b", "1xH100-SXM", f"205/{OUTPUT}", "roofline")
    return find_setting(*where, engine=engine, front_end=front_end)


def main() -> None:
    """Print predicted beside measured figures, and the largest error of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and prompts")
    seed = parser.parse_args().seed
    if not FILE.exists():
        sys.exit(f"skipped: there is no file {FILE} (EXEGPT_DATA)")
    setting = setting_of()
    print(f"{'variant':34} {'rate/s':>7}" + "".join(f" {name:>27}" for name in LIMITS))
    worst = {saturated: dict.fromkeys(LIMITS, 0.0) for saturated in (False, True)}
    for row in read_rows():
        schedule, _ = follow(setting, VARIANTS[row.variant])
        figures, texts, errors = predicted(row, schedule, setting.profile, seed), [], worst[row.saturated]
        for name, measured in row.figures.items():
            error = figures[name] / measured - 1
            errors[name] = max(errors[name], abs(error))
            pair = f"{duration_text(figures[name])} / {duration_text(measured)}"
            texts.append(f"{pair:>20} {signed_percent(error):>6}")
        print(f"{row.variant:34} {row.rate:7.1f} " + " ".join(texts) + (" saturated" if row.saturated else ""))
    print("predicted / measured")
    for saturated, errors in worst.items():
        texts = [f"{name} {signed_percent(errors[name])}" for name in LIMITS]
        print(f"largest errors of rows {'near saturation' if saturated else 'below it'}: {', '.join(texts)}")


if __name__ == "__main__":
    main()
