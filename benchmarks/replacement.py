"""Models that change places under load: what a server's requests lose when its plan changes, and how long they wait.

Two random Llamas of different shapes are served, each with a core of its own. When a thousand requests are in flight,
the plan changes: both share one core, or have one each again. Every engine is replaced, its weights are read again and
the caches of its residents recomputed. Every answer must be what an undisturbed server has given. How long streams
pause stands beside what is predicted: the starts of the engines, one after the other, as the server measured them when
the plans were changed without a request, and the prefill of the streams' sequences by the profile.

    python -m benchmarks.replacement
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.model_sizes import ModelSizes
from benchmarks.servers import orca, ready, started
from xcore import document
from xcore.specs.cluster_plan import Plan, PlannedModel, Share
from xcore.specs.profile import Profile
from xcore.specs.request_times import summarise
from xmulti.sharing.iteration_cost import ProfileCost
from xprofiler.profiles import measured_profile
from xrunner.comm.ranks import Ranks
from xrunner.models.device import CPU
from xsimulator.cost.cost_model import ReplicaCost

SIZES = {
    "wide": ModelSizes(layers=4, hidden=512, heads=8, kv_heads=8, ffn=1376, vocab=8000, context=512),
    "deep": ModelSizes(layers=8, hidden=256, heads=4, kv_heads=2, ffn=688, vocab=8000, context=512),
}
SEQS, PROMPT, OUTPUT = 32, 48, 40
"""Residents of each model, and tokens of a request."""
STREAM = 400
"""Tokens of a stream."""
TOKEN = "secret"


@dataclass(frozen=True)
class Pause:
    """One model's stop during a replacement. Seconds."""

    model: str
    measured_s: float
    """Between two tokens of a stream: the median of the streams that ran."""
    predicted_s: float


def plan_of(directories: Mapping[str, Path], together: bool) -> Plan:
    """Both models on one device, or on one each."""
    models = []
    for number, (name, directory) in enumerate(directories.items()):
        schedule = replace(orca(directory, SEQS), admission="grow")
        share, place = (Share("time", pool="merged"), 0) if together else (None, number)
        unknown = summarise((), 0.0)
        models.append(PlannedModel(name, (place,), schedule, unknown, 1.0, share=share, directory=str(directory)))
    cluster = replace(models[0].schedule.cluster, devices_per_node=2)
    return Plan(Plan.VERSION, "by hand", cluster, tuple(models))


def post(url: str, body: dict[str, object], **headers: str) -> Any:
    """A POST of JSON; the response, to be read."""
    named = {"Content-Type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), named), timeout=600)


def completion(model: str, i: int) -> dict[str, object]:
    """The i-th request of a model."""
    prompt = [3 + (31 * i + 7 * j) % 7990 for j in range(PROMPT - i % 16)]
    how = {"max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": model, "prompt": prompt, **how}


def answer(url: str, model: str, i: int) -> list[int]:
    """The tokens of its answer."""
    with post(f"{url}/v1/completions", completion(model, i)) as response:
        choice = json.load(response)["choices"][0]
    if choice["finish_reason"] != "length":
        raise ValueError(f"The server has ended an answer by '{choice['finish_reason']}'.")
    tokens: list[int] = choice["token_ids"]
    return tokens


def longest_gap(url: str, model: str, i: int, until: threading.Event) -> float:
    """Between two chunks of one stream after the other, as long as `until` isn't set; as long as the cache allows."""
    longest = 0.0
    while not until.is_set():
        with post(f"{url}/v1/completions", completion(model, i) | {"stream": True, "max_tokens": STREAM}) as response:
            last, ended, line = None, False, b""
            for line in filter(bytes.strip, response):
                ended |= b'"finish_reason":"length"' in line
                if line.startswith(b"data: {"):
                    now = time.monotonic()
                    longest, last = max(longest, 0.0 if last is None else now - last), now
                if until.is_set():
                    return longest
        if not ended or line.strip() != b"data: [DONE]":
            raise ValueError("The server has cut a stream.")
    return longest


def until_ready(url: str) -> None:
    """Wait until all models take requests again."""
    while ready(url):
        time.sleep(0.02)
    while not ready(url):
        time.sleep(0.05)


def starts(log: Path) -> list[tuple[str, float]]:
    """What the server's log says of its engines: the model, and seconds from its start until it took requests."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [(line["model"], line["seconds"]) for line in lines if line["event"] == "ready"]


def predicted(own: Mapping[str, float], plan: Plan, profiles: Mapping[str, Profile], streams: int) -> dict[str, float]:
    """How long each model's streams pause under a plan: engines start one after the other, then sequences are prefilled
    in order of arrival, two prompts at a time: the streams first, of which the one in the middle counts. `own`: seconds
    that each model's engine takes to start.
    """
    pauses, began = dict[str, float](), 0.0
    for unit in plan.units:
        began += max(own[model.name] for model in unit)
        prefill = 0.0
        for model in unit:
            cost = ProfileCost(ReplicaCost.of(model.schedule, profiles[model.name]))
            prefill += cost.prefill_seconds([PROMPT + STREAM // 2] * 2, 1.0) * streams / 2
        pauses |= {model.name: began + prefill / 2 for model in unit}
    return pauses


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000, help="in flight when the plan changes")
    parser.add_argument("--changes", type=int, default=4)
    parser.add_argument("--streams", type=int, default=5, help="of each model, whose pauses are measured")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.environ["EXEGPT_CACHE"] = name  # measured now: a profile of a busy machine may lie in the usual one
        folder = Path(name)
        directories = {model: folder / model for model in SIZES}
        for number, (model, sizes) in enumerate(SIZES.items()):
            sizes.create(directories[model], seed=number)
        profiles = {n: measured_profile(d, "fp32", Ranks(), CPU, "triton").profile for n, d in directories.items()}
        plans = [plan_of(directories, together=False), plan_of(directories, together=True)]
        document.write(folder / "plan.json", plans[0])
        (folder / "token").write_text(TOKEN + "\n")
        options = ["--plan", str(folder / "plan.json"), "--admin-token-file", str(folder / "token"), "--pinned"]
        options += ["--log-format", "json", "--max-waiting", str(2 * asked.requests)]
        with started(folder, options) as (url, _), ThreadPoolExecutor(asked.requests + 99) as pool:
            every = [(model, i) for i in range(asked.requests // 2) for model in SIZES]
            want = dict(zip(every, pool.map(lambda one: answer(url, *one), every), strict=True))
            own = []
            for plan in (plans[1], plans[0]):
                with post(f"{url}/plan", document.to_dict(plan), X_Admin_Token=TOKEN):
                    until_ready(url)
                own.append(dict(starts(folder / "server.log")[-len(SIZES) :]))
            found: list[Pause] = []
            for number in range(1, asked.changes + 1):
                plan = plans[number % 2]
                pauses, lost = change(url, plan, pool, want, asked.streams)
                expected = predicted(own[(number + 1) % 2], plan, profiles, asked.streams)
                found += [Pause(model, pause, expected[model]) for model, pause in pauses.items()]
                print(
                    f"change {number}: {len(every)} requests in flight, {lost} lost or other than undisturbed",
                    flush=True,
                )
                for pause in found[-len(SIZES) :]:
                    off = pause.predicted_s / pause.measured_s - 1
                    print(
                        f"  {pause.model}: {pause.measured_s:.2f} s, predicted {pause.predicted_s:.2f} s ({off:+.0%})"
                    )
    errors = [abs(pause.predicted_s / pause.measured_s - 1) for pause in found]
    print(f"error of the predicted pauses: {statistics.median(errors):.0%} in the median, {max(errors):.0%} at most")


def change(
    url: str, plan: Plan, pool: ThreadPoolExecutor, want: Mapping[tuple[str, int], list[int]], streams: int
) -> tuple[dict[str, float], int]:
    """Ask for everything, change the plan, and wait: each model's pause, and how many answers are wrong or missing."""
    over = threading.Event()
    gaps = {m: [pool.submit(longest_gap, url, m, 7 + i, over) for i in range(streams)] for m in SIZES}
    time.sleep(1.0)
    asked = {one: pool.submit(answer, url, *one) for one in want}
    time.sleep(2.0)
    with post(f"{url}/plan", document.to_dict(plan), X_Admin_Token=TOKEN):
        until_ready(url)
    lost = sum(future.exception() is not None or future.result() != want[one] for one, future in asked.items())
    over.set()
    return {model: statistics.median(gap.result() for gap in of_model) for model, of_model in gaps.items()}, lost


if __name__ == "__main__":
    main()
