"""Traces whose inputs and outputs correlate: steady states with and without their dependence, beside replays.

All requests are there from the start; replays of the list in its own order, and shuffled. Llama-3.1-8B on an H100, with
as many KV blocks as needed. Multi30k (translation) and arXiv (summarization) of the shared data.

    python -m benchmarks.correlated
"""

import argparse
from dataclasses import replace

import numpy as np

from benchmarks.steady_state import DATA
from xcore.requests.shuffle import shuffled_places
from xcore.specs.request_times import latencies, steady_tokens_s
from xcore.specs.schedule import Schedule
from xcore.specs.workload import RequestLengths
from xscheduler.engine_settings import engine_schedule
from xscheduler.settings import Setting, find_setting
from xsimulator import estimate
from xsimulator.replay.event_simulator import replay

TRACES = {
    "multi30k_en_de.csv": "input=en_tokens,output=de_tokens",
    "arxiv_summarization.csv": "input=num_prefill_tokens,output=num_decode_tokens",
}
POLICIES: dict[str, dict[str, int]] = {
    "rra": {"encode_batch": 16, "decode_iterations": 24},
    "orca": {"prefills_per_step": 2, "max_num_seqs": 64},
    "chunked": {"max_num_batched_tokens": 2048, "max_num_seqs": 64},
}
BLOCKS = 10**6
"""KV blocks of the cache: so many that memory never limits a batch."""


def figures(setting: Setting, schedule: Schedule, requests: list[RequestLengths]) -> np.ndarray:
    """Return tokens/s, and mean and 99th percentile of the latency of a replay's middle third."""
    run = replay(schedule, setting.profile, requests, timeline=False)
    third = len(run.served) // 3
    times = latencies(run.served[third:-third], "start")["latency"]
    return np.array([steady_tokens_s(run.served), times.mean(), np.percentile(times, 99)])


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("errors of tokens/s, mean latency, p99 of the latency")
    for name, columns in TRACES.items():
        setting = find_setting("llama-3.1-8b", "1xH100-SXM", str(DATA / "lengths" / name), columns=columns)
        workload, requests = setting.workload, list(setting.workload.requests or ())
        shuffled = [requests[k] for k in shuffled_places([0.0] * len(requests), len(requests), seed=0)]
        print(f"{name}: {len(requests):,} requests, correlation {workload.correlation:+.2f}")
        for policy, variables in POLICIES.items():
            schedule = engine_schedule(setting, policy, 1, BLOCKS, 16, **variables)
            for order, rows in (("in the trace's order", requests), ("shuffled", shuffled)):
                seen = figures(setting, schedule, rows)
                for form, copula in (("independent", None), ("dependent", workload.copula)):
                    plan = replace(schedule, workload=replace(schedule.workload, copula=copula))
                    of = estimate(plan, setting.profile)
                    off = np.array([of.throughput_tok_s, of.latency_mean_s, of.latency_p99_s or np.nan]) / seen - 1
                    print(f"  {policy:8} {order:21} {form:12} " + "  ".join(f"{error:+6.1%}" for error in off))


if __name__ == "__main__":
    main()
