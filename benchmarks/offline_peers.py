"""Output tokens per second of a list of requests: our best schedule beside vLLM's offline engine, in turns.

The same weights in float32, the same token ids, greedy, no output ends early; as many threads each. Ours is tuned for
the workload without a bound, from a profile that is measured first. vLLM runs at each of some `max_num_seqs`, without
prefix caching, as ours. Greedy tokens are compared: the first difference of rounding changes all that follow.

    python -m benchmarks.offline_peers --peers …/env                     # an environment with vLLM for CPUs
    python -m benchmarks.offline_peers --peers …/env --model DIR --requests 64
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

SEQS = (64, 256)
"""vLLM's `max_num_seqs`; it comes with 256."""


@contextmanager
def vllm(peers: Path, model: Path, requests: Path, seqs: int, threads: int) -> "Iterator[subprocess.Popen[str]]":
    """vLLM with the model loaded, which runs the requests for each line that it gets."""
    given = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    given |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "OMP_NUM_THREADS": str(threads)}
    given |= {"VLLM_LOGGING_LEVEL": "ERROR"}
    given |= {"LD_PRELOAD": " ".join(str(path) for path in sorted((peers / "lib").glob("libiomp5.so")))}
    given |= {"PATH": f"{peers / 'bin'}:{os.environ['PATH']}"}
    script = Path(__file__).with_name("vllm_offline.py")
    command = [str(peers / "bin" / "python"), str(script), str(model), str(requests), str(seqs)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ | given)
    try:
        if _line(process) != "ready":
            raise SystemExit("vLLM doesn't start")
        yield process
    finally:
        process.terminate()
        process.wait(60)


def _line(process: "subprocess.Popen[str]") -> Any:
    """The next line of JSON that it prints; other lines are its log."""
    assert process.stdout
    for line in process.stdout:
        try:
            return json.loads(line)
        except json.JSONDecodeError:
            continue
    raise SystemExit(f"vLLM has ended (exit code {process.wait()})")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="default: the demo's")
    parser.add_argument("--workload", default="T")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        os.environ["EXEGPT_CACHE"] = name  # measured now: a profile of a busy machine may lie in the usual one
        compare(asked, Path(name), stack)


def compare(asked: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
    """Run both in turns, and print rates and their ratios."""
    import torch

    from exegpt.api.demo import create_demo_model
    from xcore.console.schedule_text import schedule_text
    from xcore.requests.requests import random_requests
    from xprofiler.measure import measure_profile
    from xrunner.core.engine import Engine
    from xrunner.models import load_model
    from xscheduler.setting_search import search_schedule
    from xscheduler.settings import find_setting

    torch.set_num_threads(asked.threads)
    directory = asked.model or create_demo_model(folder / "model", 0)
    model = load_model(directory)
    measure_profile(directory)
    setting = find_setting(str(directory), "local", asked.workload, device="cpu")
    lengths = setting.workload.draw(asked.requests, asked.seed, model.spec.longest_request)
    requests = random_requests(lengths, model.spec.vocab, asked.seed)
    schedule = search_schedule(setting, None).schedule
    assert schedule, "without a bound there is one"
    print(
        f"{len(requests)} requests of {setting.workload.name}, {model.spec.name}: {schedule_text(schedule)}", flush=True
    )
    written = folder / "requests.json"
    written.write_text(json.dumps([{"prompt_ids": r.prompt_ids, "max_tokens": r.max_tokens} for r in requests]))
    theirs = {seqs: stack.enter_context(vllm(asked.peers, directory, written, seqs, asked.threads)) for seqs in SEQS}
    tokens = sum(request.max_tokens for request in requests)
    rates: dict[str, list[float]] = {}
    for number in range(asked.rounds):
        report = Engine(model, schedule).run(requests)
        rates.setdefault("exegpt", []).append(tokens / report.seconds)
        own = {result.id: list(result.output_ids) for result in report.results}
        for seqs, process in theirs.items():
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
            run = _line(process)
            rates.setdefault(f"vLLM, {seqs} at once", []).append(tokens / run["seconds"])
            equal = sum(own[r.id] == output for r, output in zip(requests, run["outputs"], strict=True))
            assert sum(map(len, run["outputs"])) == tokens, "vLLM's outputs are as long"
        print(f"round {number + 1}: " + ", ".join(f"{name} {of[-1]:.0f}" for name, of in rates.items()), flush=True)
    print(f"the same tokens: {equal} of {len(requests)} requests")
    middle = {name: statistics.median(of) for name, of in rates.items()}
    best = max(value for name, value in middle.items() if name != "exegpt")
    for name, value in middle.items():
        print(f"{name}: {value:.0f} output tokens/s")
    print(f"exegpt over vLLM's best: {middle['exegpt'] / best:.2f} times")


if __name__ == "__main__":
    main()
