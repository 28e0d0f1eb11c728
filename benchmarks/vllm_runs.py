"""Published runs of vLLM beside what data sheets predict for them; nothing was fitted on these runs.

(a) Open-loop rates of vLLM 0.11 with Llama-3-8B on one H100 (`measured/inference_perf`, the variants without prefix
caching, rates that were reached); lengths and arrivals are drawn with the published means. (b) 300 requests of vLLM
0.19 with Qwen3-32B on two RTX PRO 6000 (`measured/llmservingsim2`), one by one. No GPU is needed.

    python -m benchmarks.vllm_runs
"""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.silicon import DATA, admitted_by_vllm, chunked_engine
from exegpt.builtin_models import builtin_model
from exegpt.cluster import parse_cluster
from exegpt.engine import EngineSpec, find_engine
from exegpt.served import Served, latencies
from exegpt.workload import RequestLengths, Workload
from xprofiler.roofline import roofline_profile

OPEN_LOOP = DATA / "measured" / "inference_perf" / "kubecon2025_llama3-8b_h100.csv"
REQUESTS = DATA / "measured" / "llmservingsim2" / "Qwen3-32B" / "requests.jsonl"
MOST_SEQUENCES = {"vllm": 128, "vllm+batch_size": 192}
"""By variant, as its flags say."""
REACHED = 0.98
"""Of the requested rate: below, the server was saturated and the load was another."""
FRONT_END_S = 13e-3
"""Of (a): the difference between the client's and the server's time to first token."""


@dataclass(frozen=True)
class Means:
    """Means of a run's requests, seconds."""

    latency: float
    tpot: float
    ttft: float

    @staticmethod
    def of(served: Sequence[Served]) -> "Means":
        """Return the means of served requests since their arrival."""
        columns = latencies(served, "arrival")
        return Means(*(float(columns[name].mean()) for name in ("latency", "tpot", "ttft")))

    def errors(self, measured: "Means") -> tuple[float, float, float]:
        """Return the relative errors of latency, time per token and time to first token."""
        pairs = ((self.latency, measured.latency), (self.tpot, measured.tpot), (self.ttft, measured.ttft))
        latency, tpot, ttft = (predicted / value - 1.0 for predicted, value in pairs)
        return latency, tpot, ttft


@dataclass(frozen=True)
class Engine:
    """A server: its model on a cluster, its version's preset, its limits."""

    model: str
    cluster: str
    tp: int
    spec: EngineSpec
    sequences: int
    tokens: int

    def serve(self, requests: Sequence[RequestLengths]) -> Means:
        """Return what these requests are predicted to experience."""
        from xsimulator.replay.event_simulator import replay

        cluster = parse_cluster(self.cluster)
        profile = roofline_profile(builtin_model(self.model), cluster, "bf16", (self.tp,), engine=self.spec)
        workload = Workload.from_requests("run", list(requests))
        limits = (self.tp, self.sequences, self.tokens)
        schedule = admitted_by_vllm(chunked_engine(self.model, self.cluster, workload, profile, "bf16", *limits))
        return Means.of(replay(schedule, profile, requests, timeline=False).served)


def open_loop() -> Iterator[tuple[str, Means, Means]]:
    """Yield each rate's name, measured and predicted means."""
    spec = replace(find_engine("vllm-0.11"), front_end_s=FRONT_END_S)
    with OPEN_LOOP.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["variant"] in MOST_SEQUENCES]
    for row in rows:
        rate, count = float(row["load_requested_rate"]), int(row["successes"])
        if float(row["load_achieved_rate"]) < REACHED * rate:
            continue
        output, prompt = float(row["output_len_mean"]), round(float(row["prompt_len_mean"]))
        latency, ttft = (float(row[f"{name}_mean_s"]) for name in ("request_latency", "time_to_first_token"))
        rng = np.random.default_rng(0)
        arrivals = np.cumsum(rng.exponential(1 / rate, count))
        outputs = np.clip(np.rint(rng.normal(output, 2.0, count)), 1, None)
        requests = [RequestLengths(prompt, int(o), float(at)) for o, at in zip(outputs, arrivals, strict=True)]
        engine = Engine("llama-3-8b", "1xH100-SXM", 1, spec, MOST_SEQUENCES[row["variant"]], 8192)
        measured = Means(latency, (latency - ttft) / (output - 1), ttft)
        yield f"{row['variant']}, {rate:g}/s", measured, engine.serve(requests)


def request_by_request() -> tuple[Means, Means]:
    """Return measured and predicted means since each request was queued: its front end is not in them."""
    rows = [json.loads(line) for line in REQUESTS.read_text(encoding="utf-8").splitlines()]
    begin = rows[0]["queued_ts"]
    requests, measured = [], []
    for index, row in enumerate(rows):
        names = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
        at = [row[name] - begin for name in names]
        requests.append(RequestLengths(row["input_toks"], row["output_toks"], at[0]))
        measured.append(Served(index, row["input_toks"], row["output_toks"], *at))
    spec = replace(find_engine("vllm"), front_end_s=0.0)
    return Means.of(measured), Engine("qwen3-32b", "2xRTXPRO6000", 2, spec, 128, 2048).serve(requests)


def _line(name: str, measured: Means, predicted: Means) -> str:
    latency, tpot, ttft = predicted.errors(measured)
    times = f"{measured.latency:8.3f} s {measured.tpot * 1e3:7.2f} ms {measured.ttft * 1e3:9.1f} ms"
    return f"    {name:28} {times}   {latency:+7.1%} {tpot:+7.1%} {ttft:+7.1%}"


def main() -> None:
    """Print both tables: measured means and relative errors."""
    print(f"    {'':28} {'latency':>10} {'per token':>10} {'TTFT':>12}   errors of the prediction")
    if OPEN_LOOP.exists():
        print("(a) vLLM 0.11, Llama-3-8B on one H100, engine vllm-0.11, front end 13 ms")
        for entry in open_loop():
            print(_line(*entry))
    if REQUESTS.exists():
        print("(b) vLLM 0.19, Qwen3-32B on two RTX PRO 6000, engine vllm")
        print(_line("300 requests", *request_by_request()))


if __name__ == "__main__":
    main()
