"""`exegpt bench serve` beside `vllm bench serve`: the same load on the same server, in turns.

The load is one trace: Poisson arrivals, token ids drawn at random, outputs of fixed length. Both clients replay it on
an `exegpt serve` of a small model that this command starts. Compared are the medians over the rounds of request
throughput, mean TTFT, mean TPOT and mean latency. Exit code 1 if one differs by over 5 %. Any build of vLLM will do,
also one beside the project's environment: the client needs neither its engine nor a GPU.

    python -m benchmarks.bench_serve
    PYTHONPATH=…/site-packages python -m benchmarks.bench_serve --rounds 5 --requests 200
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.servers import INPUT, OUTPUT, SIZES, give_text, orca, running
from xcore import document
from xcore.traces.arrivals import random_arrivals

MOST = 0.05
"""By how much a figure may differ."""
CLIENT = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve` without the rest of vLLM's command line, which needs its server's packages."""

Figures = dict[str, float]
"""request throughput in 1/s; TTFT, TPOT and latency as means in seconds"""


def write_trace(path: Path, requests: int, rate: float, seed: int) -> None:
    """A trace in Mooncake's form, which both clients read: milliseconds, and hashes of blocks that no two requests
    share.
    """
    lines, blocks = [], -(-INPUT // 16)
    for i, arrival_s in enumerate(random_arrivals(rate, requests, (seed,))):
        ids = list(range(i * blocks, (i + 1) * blocks))
        row = {"timestamp": 1e3 * float(arrival_s), "input_length": INPUT, "output_length": OUTPUT, "hash_ids": ids}
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def ours(url: str, model: Path, trace: Path, result: Path) -> Figures:
    """What `exegpt bench serve` measures; since requests were sent, as vLLM does, not since they arrived."""
    command = [sys.executable, "-m", "exegpt", "bench", "serve", "--url", url, "--arrivals", "trace"]
    # ids of the whole vocabulary, as vLLM draws them: outputs resemble prompts, and bytes' texts are held back
    done = _run([*command, "--workload", str(trace), "--vocab", str(SIZES.vocab), "--json"])
    (run,) = json.loads(done)["runs"]
    if not run["valid"] or run["completed"] < run["requests"]:
        raise SystemExit(f"The run is invalid: {run['warnings']}, {run['errors']}.")
    times = run["since_sent"] | {"tpot": run["tpot"]}
    return {"throughput": run["throughput_seq_s"], **{key: times[key]["mean"] for key in ("ttft", "tpot", "latency")}}


def theirs(url: str, model: Path, trace: Path, result: Path) -> Figures:
    """What `vllm bench serve` measures."""
    options = {
        "backend": "openai",
        "base-url": url,
        "model": model.name,
        "tokenizer": model,
        "dataset-name": "timed_trace",
        "dataset-path": trace,
        "timed-trace-sec-multiplier": 1e-3,
        "num-prompts": len(trace.read_text().splitlines()),
        "temperature": 0,
        "percentile-metrics": "ttft,tpot,e2el",
        "result-dir": result.parent,
        "result-filename": result.name,
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    _run([sys.executable, "-c", CLIENT, *flags, "--ignore-eos", "--save-result", "--self-timed", "--disable-tqdm"])
    measured = json.loads(result.read_text())
    if measured["failed"]:
        raise SystemExit(f"{measured['failed']} of vLLM's requests failed.")
    if measured["total_output_tokens"] < (asked := OUTPUT * int(str(options["num-prompts"]))):
        raise SystemExit(f"vLLM's requests got {measured['total_output_tokens']} tokens of {asked}.")
    names = {"ttft": "mean_ttft_ms", "tpot": "mean_tpot_ms", "latency": "mean_e2el_ms"}
    means = {key: measured[name] / 1e3 for key, name in names.items()}
    return {"throughput": measured["request_throughput"], **means}


def _run(command: list[str]) -> str:
    """A command's standard output; its standard error where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    if done.returncode:
        raise SystemExit(f"{' '.join(command[1:5])} failed: {done.stderr[-2000:]}")
    return done.stdout


@contextmanager
def served(directory: Path, seqs: int = 16) -> Iterator[tuple[str, Path]]:
    """URL and model of a server on one thread."""
    model, schedule = directory / "model", directory / "schedule.json"
    SIZES.create(model, seed=1)
    give_text(model / "tokenizer.json", SIZES.vocab)
    document.write(schedule, orca(model, seqs))
    with running(directory, model, schedule) as (url, _):
        yield url, model


def medians(runs: list[Figures]) -> Figures:
    """Each figure's median."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def table(own: list[Figures], peer: list[Figures]) -> tuple[str, bool]:
    """Both clients' medians and the difference, with the span of the rounds' ratios, and whether all agree."""
    lines, alike, us, them = [], True, medians(own), medians(peer)
    for key, value in us.items():
        scale, unit = (1.0, "1/s") if key == "throughput" else (1e3, "ms")
        ratios = [a[key] / b[key] - 1 for a, b in zip(own, peer, strict=True)]
        difference = value / them[key] - 1
        alike &= abs(difference) <= MOST
        lines.append(
            f"{key:10} {value * scale:9.3f} {them[key] * scale:9.3f} {unit:4} {difference:+7.1%}   "
            f"(rounds {min(ratios):+.1%} to {max(ratios):+.1%})"
        )
    return "\n".join([f"{'':10} {'ours':>9} {'vLLM':>9} {'':4} {'diff.':>7}", *lines]), alike


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="of each client, in turns")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("vLLM isn't installed, so there is nothing to compare with: skipped.")
        return
    own, peer = list[Figures](), list[Figures]()
    with tempfile.TemporaryDirectory() as name, served(Path(name)) as (url, model):
        trace, result = Path(name) / "trace.jsonl", Path(name) / "vllm.json"
        write_trace(trace, args.requests, args.rate, args.seed)
        ours(url, model, trace, result)  # the server's first requests are its slowest
        for number in range(args.rounds):
            for client, runs in ((theirs, peer), (ours, own))[:: -1 if number % 2 else 1]:
                runs.append(client(url, model, trace, result))
            print(f"round {number + 1}: ours {own[-1]}, vLLM {peer[-1]}", file=sys.stderr)
    text, alike = table(own, peer)
    print(f"{args.requests} requests, {args.rate:g}/s, {INPUT}/{OUTPUT} tokens, {args.rounds} rounds of each.\n{text}")
    sys.exit(not alike)


if __name__ == "__main__":
    main()
