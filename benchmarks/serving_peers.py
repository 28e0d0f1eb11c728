"""`exegpt serve` beside `vllm serve` and `transformers serve`: the goodput that each reaches within a latency bound.

One model in float32, one thread of computation each, the same requests at the same moments, sent by `vllm bench serve`
to one server at a time, in turns; the others idle. The bounds are multiples of vLLM's median latency when unloaded,
fixed before any load; ours finds its schedule for each, with `--best-effort`. vLLM runs as it comes, and for each
bound at its best of some `max_num_seqs` and `max_num_batched_tokens`, and, at the highest load, in rounds with ours,
behind caps on the requests that it has at a time. A request counts if its answer is whole and within the bound since it
was sent; goodput is such requests over the time in which requests came. Medians over the rounds.

The environment with vLLM (any build), transformers' server and pandas lies beside the project's:

    python -m benchmarks.serving_peers --peers …/env                 # three rounds: two hours
    python -m benchmarks.serving_peers --peers …/env --rounds 1 --seconds 30 --bounds 4 --no-transformers
    python -m benchmarks.serving_peers --peers …/env --only-capped   # ours and vLLM behind caps alone: 25 minutes
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.servers import SIZES, give_text, ready
from xcore.specs.workload import task
from xcore.traces.arrivals import random_arrivals

STARTS_S = 300
SEQS, TOKENS = (8, 16, 32, 64), (512, 2048)
"""vLLM's `max_num_seqs` and `max_num_batched_tokens` that are tried; it comes with 256 and 2,048."""
LOADS = {"vLLM": (0.5, 0.75, 1.0, 2.0), "exegpt": (1.0, 2.0), "transformers": (0.03, 0.1)}
"""Offered loads by server, over the requests/s that vLLM answers when far too many come. Ours turns away what it can't
answer in time, and has its highest goodput at high loads; transformers' would be answering them for long.
"""
OVERLOAD = 2.0
"""The load that lasts for `--overload-seconds`: what a server that takes everything answers in time of it depends on
how long it lasts. Of vLLM's servers it is for the one as it comes, alone and behind caps: with limits of their own they
turn nothing away either.
"""
SEARCH_S = 15.0
"""Of each load while vLLM's limits are searched."""
CAPS = (12, 18, 27, 40, 60)
"""Requests at a time that are let through to vLLM."""
PATIENCE_S = 240.0
"""Beyond a load's own time, until a client is taken for hung."""
FIRST_PORT = 8810
TIMED = {"backend": "openai", "dataset-name": "timed_trace", "timed-trace-sec-multiplier": 1e-3}
"""vLLM's client: prompts of token ids at the moments of a file."""
CONVERSATIONS = {
    "backend": "openai-chat",
    "endpoint": "/v1/chat/completions",
    "dataset-name": "custom",
    "custom-output-len": -1,
}
"""Of its keys, transformers' server takes those of chats alone: as many bytes, each a token, at Poisson arrivals of its
own. It heeds one limit of outputs for all: the mean. They may end sooner there.
"""


@dataclass(frozen=True)
class Server:
    """A server that runs: what it is called, where it listens, and as what it knows the model."""

    name: str
    url: str
    model: str


@dataclass(frozen=True)
class Run:
    """What one load on one server came to."""

    latencies_s: tuple[float, ...]
    """Of whole answers."""
    failed: int
    seconds: float
    """In which requests came."""
    whole_s: float
    """Until the last answer."""

    def goodput(self, bound_s: float) -> float:
        """Requests/s within a bound."""
        return sum(latency <= bound_s for latency in self.latencies_s) / self.seconds


@dataclass(frozen=True)
class Bench:
    """Where everything lies that the servers and the client need."""

    directory: Path
    peers: Path
    workload: str
    seconds: float
    overload_s: float

    @property
    def model(self) -> Path:
        return self.directory / "model"

    @property
    def environment(self) -> dict[str, str]:
        """Of the peers' processes: vLLM's one thread keeps to the first CPU, as it wants to."""
        given = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_NO_USAGE_STATS": "1"}
        preload = " ".join(str(path) for path in sorted((self.peers / "lib").glob("libiomp5.so")))
        given |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "LD_PRELOAD": preload}
        return os.environ | given | {"PATH": f"{self.peers / 'bin'}:{os.environ['PATH']}"}

    @contextmanager
    def started(self, name: str, port: int, command: Sequence[object], known_as: str, path: str) -> Iterator[Server]:
        """A server, once it answers at a path."""
        log, environment = self.directory / f"{port}.log", os.environ if command[0] == sys.executable else None
        with log.open("w") as written:
            words = [str(word) for word in command]
            server = subprocess.Popen(words, stdout=written, stderr=written, env=environment or self.environment)
        try:
            until, url = time.monotonic() + STARTS_S, f"http://127.0.0.1:{port}"
            while not ready(url, path):
                if server.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"{name} doesn't start: {log.read_text()[-2000:]}")
                time.sleep(0.5)
            yield Server(name, url, known_as)
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()

    def vllm(self, port: int, seqs: int | None = None, tokens: int | None = None) -> AbstractContextManager[Server]:
        """vLLM's server, as it comes or with limits."""
        limits = [] if seqs is None else ["--max-num-seqs", seqs, "--max-num-batched-tokens", tokens]
        name = "vLLM" if seqs is None else f"vLLM {seqs} seqs, {tokens} tokens"
        command = [
            self.peers / "bin" / "vllm",
            "serve",
            self.model,
            "--served-model-name",
            "model",
            "--port",
            port,
        ]
        options = ["--dtype", "float32", "--host", "127.0.0.1", "--no-enable-prefix-caching"]
        return self.started(name, port, [*command, *options, *limits], "model", "/health")

    def transformers(self, port: int) -> AbstractContextManager[Server]:
        """transformers' server with continuous batching."""
        command = [
            self.peers / "bin" / "transformers",
            "serve",
            self.model,
            "--continuous-batching",
            "--dtype",
        ]
        options = ["float32", "--device", "cpu", "--host", "127.0.0.1", "--port", port]
        options += ["--cb-num-blocks", "256"]  # else nine tenths of the machine's memory
        return self.started("transformers", port, [*command, *options], str(self.model), "/health")

    def ours(self, port: int, bound_s: float) -> AbstractContextManager[Server]:
        """Our server, with the schedule that it finds for a bound."""
        command = [
            sys.executable,
            "-m",
            "exegpt",
            "serve",
            "-m",
            self.model,
            "-l",
            f"{bound_s:.3f}s",
            "--port",
            port,
        ]
        options: list[object] = ["-w", self.workload, "--threads", 1, "--pinned", "--best-effort"]
        return self.started(own_name(bound_s), port, [*command, *options], "model", "/ready")

    def capped(self, port: int, to: Server, most: int) -> AbstractContextManager[Server]:
        """A cap before a server."""
        command: list[object] = [
            sys.executable,
            "-m",
            "benchmarks.capped",
            "--port",
            port,
            "--to",
            to.url.rpartition(":")[2],
        ]
        return self.started(f"vLLM behind {most}", port, [*command, "--most", most], to.model, "/health")

    def load(self, server: Server, rate: float, seed: int, seconds: float | None = None) -> Run:
        """Requests of the workload at a rate, sent by vLLM's client; `rate` 0: one after the other."""
        seconds, requests = seconds or self.seconds, self.directory / "requests.jsonl"
        num, result = max(8, round(rate * seconds)), self.directory / "result.json"
        options: dict[str, object] = {
            "base-url": server.url,
            "model": server.model,
            "tokenizer": self.model,
            "dataset-path": requests,
            "num-prompts": num,
            "temperature": 0,
            "result-dir": self.directory,
            "result-filename": result.name,
        } | ({} if rate else {"max-concurrency": 1})
        flags = ["--save-result", "--save-detailed", "--disable-tqdm"]
        if server.name == "transformers":
            span = write_conversations(requests, self.workload, num, rate, seed)
            most = round(task(self.workload).output.mean)
            options |= CONVERSATIONS | {
                "request-rate": rate,
                "seed": seed,
                "extra-body": json.dumps({"max_tokens": most}),
            }
            flags += ["--skip-chat-template", "--disable-shuffle"]
        else:
            span = write_requests(requests, self.workload, num, rate, seed)
            options |= TIMED
            flags += ["--self-timed", "--ignore-eos"]
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        client = [str(self.peers / "bin" / "vllm"), "bench", "serve", *words, *flags]
        # one after the other takes as long as it takes; transformers' server answers long after a load
        limit = span + PATIENCE_S if rate and server.name != "transformers" else None
        try:
            done = subprocess.run(client, capture_output=True, text=True, env=self.environment, timeout=limit)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{server.name} leaves requests without an answer for {limit:.0f} s.") from None
        if done.returncode:
            raise SystemExit(f"vLLM's client failed: {done.stderr[-2000:]}")
        rows = map(json.loads, requests.read_text().splitlines())
        return read_run(json.loads(result.read_text()), span, [row.get("output_length", 1) for row in rows])


def own_name(bound_s: float) -> str:
    """Our server's name, with a schedule for a bound."""
    return f"exegpt {bound_s:.2f} s"


def write_requests(path: Path, workload: str, num: int, rate: float, seed: int) -> float:
    """A trace in Mooncake's form of a workload's lengths with Poisson arrivals; the seconds in which requests come."""
    arrivals = random_arrivals(rate, num, (seed,)) if rate else [0.0] * num
    lines, block = [], 0
    for row, arrival_s in zip(task(workload).draw(num, seed, SIZES.context), arrivals, strict=True):
        blocks = list(range(block, block := block + -(-row.input // 16)))
        lengths = {"input_length": row.input, "output_length": row.output, "hash_ids": blocks}
        lines.append(json.dumps({"timestamp": 1e3 * float(arrival_s)} | lengths))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return float(arrivals[-1]) or 1.0


def write_conversations(path: Path, workload: str, num: int, rate: float, seed: int) -> float:
    """The same lengths as texts, in the client's own form; the seconds in which requests come on average."""
    rows = task(workload).draw(num, seed, SIZES.context)
    lines = [json.dumps({"prompt": "a" * row.input, "output_tokens": row.output}) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return num / rate


def read_run(result: dict[str, Any], seconds: float, asked: Sequence[int]) -> Run:
    """What vLLM's client saved: a request without a first token failed, and one with fewer tokens than it asked for:
    the client takes a stream that was cut for an answer.
    """
    rows = zip(result["ttfts"], result["itls"], result["errors"], result["output_lens"], asked, strict=True)
    latencies = [first + sum(gaps) for first, gaps, error, got, want in rows if not error and first and got >= want]
    return Run(tuple(latencies), len(result["errors"]) - len(latencies), seconds, result["duration"])


def best_limits(
    bench: Bench, bounds: Sequence[float], peak: float, say: Callable[[str], None]
) -> dict[float, tuple[int, int]]:
    """For each bound, vLLM's limits with the highest goodput around its peak."""
    found: dict[tuple[int, int], list[Run]] = {}

    def measure(seqs: int, tokens: int) -> None:
        with bench.vllm(FIRST_PORT, seqs, tokens) as server:
            bench.load(server, peak, 99, 10.0)
            found[seqs, tokens] = [bench.load(server, share * peak, 100, SEARCH_S) for share in (0.6, 0.9)]
        goods = ", ".join(f"{max(run.goodput(bound) for run in found[seqs, tokens]):.2f}/s" for bound in bounds)
        say(f"vLLM with {seqs} sequences and {tokens} tokens: {goods}")

    def best(bound: float) -> tuple[int, int]:
        return max(found, key=lambda limits: sum(run.goodput(bound) for run in found[limits]))

    for seqs in SEQS:
        measure(seqs, TOKENS[-1])
    for seqs, tokens in {(best(bound)[0], tokens) for bound in bounds for tokens in TOKENS[:-1]}:
        measure(seqs, tokens)
    return {bound: best(bound) for bound in bounds}


def table(
    runs: dict[tuple[str, float], list[Run]], names: Sequence[str], bound_s: float, loads: Sequence[float]
) -> str:
    """Goodput by server and offered load within a bound, medians over rounds."""
    lines = [f"within {bound_s:.2f} s, requests/s at an offered load of"]
    lines.append(f"{'':28}" + "".join(f"{load:9.2f}" for load in loads) + "     peak  failed")
    for name in names:
        found = [runs.get((name, load), []) for load in loads]
        goods = [statistics.median(run.goodput(bound_s) for run in some) if some else math.nan for some in found]
        peak, failed = max(good for good in goods if good >= 0), sum(run.failed for some in found for run in some)
        lines.append(f"{name:28}" + "".join(f"{good:9.2f}" for good in goods) + f"{peak:9.2f}{failed:8}")
    return "\n".join(lines)


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=Path, required=True, help="environment with vLLM")
    parser.add_argument("--workload", default="T")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--overload-seconds", type=float, default=60.0, help="of the highest one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bounds", default="2,4,10", help="over vLLM's unloaded median latency")
    parser.add_argument("--limits", help="vLLM's best limits for each bound, SEQS:TOKENS,…: not searched")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument(
        "--caps", default=",".join(map(str, CAPS)), help="requests at a time that are let through to vLLM"
    )
    parser.add_argument("--only-capped", action="store_true", help="ours and vLLM behind caps, at the highest load")
    asked = parser.parse_args()

    def say(text: str) -> None:
        print(text, flush=True)

    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        bench = Bench(Path(name), asked.peers.absolute(), asked.workload, asked.seconds, asked.overload_seconds)
        SIZES.create(bench.model, seed=1)
        give_text(bench.model / "tokenizer.json", SIZES.vocab)
        with bench.vllm(FIRST_PORT) as server:
            bench.load(server, 4.0, 98, 10.0)  # a server's first requests are its slowest
            alone_s = statistics.median(bench.load(server, 0.0, 97).latencies_s)
            flood = bench.load(server, 12.0, 96, 20.0)
            say(f"vLLM unloaded: median latency {alone_s:.2f} s")
        peak = len(flood.latencies_s) / flood.whole_s
        loads = sorted({share * peak for shares in LOADS.values() for share in shares})
        bounds = [float(share) * alone_s for share in asked.bounds.split(",")]
        say(f"vLLM flooded: {peak:.2f} requests/s; bounds {', '.join(f'{bound:.2f} s' for bound in bounds)}")
        ours = [bench.ours(FIRST_PORT + 20 + i, bound) for i, bound in enumerate(bounds)]
        starts = [bench.vllm(FIRST_PORT), *ours]
        if not asked.only_capped:
            limits = given_limits(asked.limits, bounds) or best_limits(bench, bounds, peak, say)
            starts += [bench.vllm(FIRST_PORT + 1 + i, *pair) for i, pair in enumerate(sorted(set(limits.values())))]
            starts += [] if asked.no_transformers else [bench.transformers(FIRST_PORT + 40)]
        servers = [running.enter_context(start) for start in starts]
        for server in servers:
            bench.load(server, 0.3 * peak, 95, 5.0)
        if not asked.only_capped:
            runs = measured_in_turns(bench, servers, peak, asked.rounds)
            others = [server.name for server in servers if not server.name.startswith("exegpt")]
            for bound in bounds:
                say(table(runs, [own_name(bound), *others], bound, loads))
        caps = [int(most) for most in asked.caps.split(",")]
        capped = measured_behind_caps(bench, servers[: 1 + len(ours)], caps, OVERLOAD * peak, asked.rounds)
        for bound in bounds:
            say(beside_caps(capped, bound))


def given_limits(text: str | None, bounds: Sequence[float]) -> dict[float, tuple[int, int]]:
    """vLLM's limits for each bound, of SEQS:TOKENS,…"""
    if not text:
        return {}
    pairs = [pair.split(":") for pair in text.split(",")]
    return {bound: (int(seqs), int(tokens)) for bound, (seqs, tokens) in zip(bounds, pairs, strict=True)}


def measured_in_turns(
    bench: Bench, servers: Sequence[Server], peak: float, rounds: int
) -> dict[tuple[str, float], list[Run]]:
    """Every load of every server, in each round."""
    runs: dict[tuple[str, float], list[Run]] = {}
    for number in range(rounds):
        for share in sorted({share for shares in LOADS.values() for share in shares}):
            for server in servers[:: -1 if number % 2 else 1]:
                if share in LOADS[server.name.split()[0]] and (share < OVERLOAD or " seqs" not in server.name):
                    seconds = bench.overload_s if share == OVERLOAD else bench.seconds
                    found = bench.load(server, share * peak, number, seconds)
                    runs.setdefault((server.name, share * peak), []).append(found)
        print(f"round {number + 1} of {rounds} is done", file=sys.stderr, flush=True)
    return runs


def measured_behind_caps(
    bench: Bench, servers: Sequence[Server], caps: Sequence[int], load: float, rounds: int
) -> dict[str, list[Run]]:
    """A load on vLLM as it comes, behind each cap, and on ours: the same requests in each round."""
    vllm, *ours = servers
    runs: dict[str, list[Run]] = {}
    for number in range(rounds):
        for server in ours:
            runs.setdefault(server.name, []).append(bench.load(server, load, number, bench.overload_s))
        for most in caps:
            with bench.capped(FIRST_PORT + 50, vllm, most) as server:
                runs.setdefault(server.name, []).append(bench.load(server, load, number, bench.overload_s))
        print(f"round {number + 1} of {rounds} is done", file=sys.stderr, flush=True)
    return runs


def beside_caps(runs: dict[str, list[Run]], bound_s: float) -> str:
    """Goodput of ours within a bound, and of vLLM behind each cap: medians over rounds, and of the rounds' ratios."""
    goods = {name: [run.goodput(bound_s) for run in found] for name, found in runs.items()}
    caps = {name: found for name, found in goods.items() if name.startswith("vLLM")}
    best, ours = max(caps, key=lambda name: statistics.median(caps[name])), goods[own_name(bound_s)]
    ratio = statistics.median(own / other for own, other in zip(ours, caps[best], strict=True))
    shown = ", ".join(f"{name} {statistics.median(found):.2f}" for name, found in caps.items())
    own = statistics.median(ours)
    return f"within {bound_s:.2f} s at the highest load: {own:.2f}/s; {shown}: {ratio:.2f} times the best in its round"


if __name__ == "__main__":
    main()
