"""Published measurements that no constant was fitted to, or looked at during the fit: beside predictions.

TensorRT-LLM 0.14 at request rates, version 0.9's times to first token of one request alone, and vLLM 0.10 on eight
MI300X, whose roofline has only its data sheet.

    python -m benchmarks.published_others
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.published import MOST_SEQUENCES, MOST_TOKENS
from benchmarks.silicon import DATA
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import ClusterSpec, parse_cluster
from xcore.specs.engine_spec import find_engine
from xcore.specs.request_times import RequestTimes, latencies
from xcore.specs.workload import RequestLengths, Workload
from xprofiler.roofline import roofline_profile
from xscheduler.engine_settings import engine_schedule
from xscheduler.settings import Setting

FOLDER = DATA / "published"
MODELS = {
    "Llama-3.1-8B": "llama-3.1-8b",
    "Llama-3.1-70B": "llama-3.1-70b",
    "Llama-3.1-405B": "llama-3.1-405b",
    "Llama-2-7B": "llama-2-7b",
    "Llama-2-70B": "llama-2-70b",
    "Mistral-7B": "mistral-7b-v0.3",
}
DEVICES = {"H100-SXM": "H100-SXM", "H200-SXM": "H200-SXM", "A100-80GB-SXM": "A100-80GB", "L40S": "L40S"}


@dataclass(frozen=True)
class Difference:
    """One figure of one row."""

    table: str
    group: str
    error: float
    """(predicted - published) / published."""


def run(
    model: str, cluster: ClusterSpec, dtype: str, engine: str, requests: list[RequestLengths], seqs: int
) -> tuple[tuple[RequestTimes, ...], float]:
    """What requests experience on all devices as one tensor-parallel group, and how long all take (seconds)."""
    from xsimulator.replay.event_simulator import replay

    spec = builtin_model(model)
    profile = roofline_profile(spec, cluster, dtype, kv_dtype=dtype, engine=find_engine(engine))
    setting = Setting(spec, cluster, Workload.from_requests("row", requests), profile, dtype, ())
    controls = {"max_num_seqs": seqs, "max_num_batched_tokens": MOST_TOKENS}
    schedule = engine_schedule(setting, "chunked", cluster.devices, None, 16, **controls)
    done = replay(schedule, profile, requests, timeline=False)
    return done.served, done.seconds


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (FOLDER / name).open(encoding="utf-8", newline="") as file:
        yield from (row for row in csv.DictReader(file) if row["model"] in MODELS)


def serving() -> Iterator[Difference]:
    """500 requests at a rate (Poisson, all of the mean length), or all at once."""
    for row in _rows("trtllm_serving.csv"):
        rate, count = row["offered_requests_per_s"], int(row["requests"])
        gaps = np.random.default_rng(0).exponential(1.0 / float(rate), count) if rate else np.zeros(count)
        arrivals = np.cumsum(gaps).tolist()
        requests = [RequestLengths(int(row["isl"]), int(row["osl"]), at) for at in arrivals]
        cluster = parse_cluster(f"{row['tp']}x{DEVICES[row['gpu']]}")
        served, seconds = run(MODELS[row["model"]], cluster, "bf16", "tensorrt-llm", requests, MOST_SEQUENCES)
        times, group = latencies(served, "arrival"), f"TP {row['tp']}, {'at a rate' if rate else 'all at once'}"
        tokens_s = count * int(row["osl"]) / seconds
        yield Difference("TensorRT-LLM 0.14, TPOT", group, float(times["tpot"].mean()) / float(row["mean_itl_s"]) - 1)
        yield Difference("TensorRT-LLM 0.14, TTFT", group, float(times["ttft"].mean()) / float(row["mean_ttft_s"]) - 1)
        if not rate:
            yield Difference("TensorRT-LLM 0.14, tokens/s", group, tokens_s / float(row["output_tokens_per_s"]) - 1)


def first_tokens() -> Iterator[Difference]:
    """A single request with one output token."""
    for row in _rows("trtllm_ttft.csv"):
        cluster = parse_cluster(f"{row['tp']}x{DEVICES[row['gpu']]}")
        request = [RequestLengths(int(row["isl"]), 1)]
        _, seconds = run(MODELS[row["model"]], cluster, row["precision"], "tensorrt-llm", request, 1)
        group = f"TP {row['tp']}, {row['isl']} tokens"
        yield Difference("TensorRT-LLM 0.9, first token alone", group, seconds / float(row["ttft_s"]) - 1)


def rocm() -> Iterator[Difference]:
    """vLLM on eight MI300X: maximum load, then whole batches."""
    cluster = parse_cluster("8xMI300X")
    for row in _rows("rocm_vllm_throughput.csv"):
        requests = [RequestLengths(int(row["isl"]), int(row["osl"]))] * int(row["requests"])
        _, seconds = run(MODELS[row["model"]], cluster, "fp8", "vllm-0.11", requests, int(row["max_num_seqs"]))
        tokens_s = len(requests) * int(row["osl"]) / seconds
        yield Difference("vLLM 0.10, tokens/s", "8 x MI300X", tokens_s / float(row["tokens_per_s"]) - 1)
    for row in _rows("rocm_vllm_latency.csv"):
        requests = [RequestLengths(int(row["isl"]), int(row["osl"]))] * int(row["batch_size"])
        _, seconds = run(MODELS[row["model"]], cluster, "fp8", "vllm-0.11", requests, len(requests))
        few = "up to 16" if len(requests) <= 16 else "32 to 128"
        yield Difference("vLLM 0.10, latency", f"8 x MI300X, batches of {few}", seconds / float(row["latency_s"]) - 1)


def main() -> None:
    """Print the signed and the absolute median of every figure, with its worst."""
    if not FOLDER.exists():
        raise SystemExit(f"'{FOLDER}' is not there: set EXEGPT_DATA to a folder with published measurements.")
    rows = [row for source in (serving, first_tokens, rocm) for row in source()]
    print(f"    {'':36} {'':32} {'rows':>5} {'median':>8} {'absolute':>9} {'largest':>8}")
    for table, group in dict.fromkeys((row.table, row.group) for row in rows):
        errors = np.array([row.error for row in rows if (row.table, row.group) == (table, group)])
        largest = errors[np.argmax(abs(errors))]
        signed, absolute = np.median(errors), np.median(abs(errors))
        print(f"    {table:36} {group:32} {len(errors):5} {signed:+8.1%} {absolute:9.1%} {largest:+8.1%}")


if __name__ == "__main__":
    main()
