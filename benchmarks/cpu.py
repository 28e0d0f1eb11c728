"""Output tokens per second of a list of requests on this CPU: ours beside those of vLLM, OpenVINO GenAI and others.

The same weights, token ids and threads, greedy, no output ends early. Each engine tries as many settings: ours the best
schedules of two policies, which are searched by replays of the list, from a profile that is measured first; the others
two limits on the sequences at a time. A peer runs in turns with ours, so that a ratio is of neighbouring runs. The
limit is the time of all floating-point operations or of all bytes, the longer one, by rates that are measured first.

    python -m benchmarks.cpu --peers vllm,openvino,llamacpp,transformers --envs DIR   # environments DIR/vllm, …
    python -m benchmarks.cpu --peers openvino --envs DIR --dtype bf16 --workload S --requests 24
    python -m benchmarks.cpu --peers openvino --envs DIR --model MODEL --settings openvino=64   # an earlier run's best

`benchmarks.cpu_policies` compares our policies, and their phases with the machine's limit.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from xcore.console import output
from xcore.requests.request import Request
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import Schedule

SETTINGS = {
    "vllm": ("64", "256"),
    "openvino": ("64", "256"),
    "llamacpp": ("16", "64"),
    "transformers": ("16", "64"),
}
"""Limits on the sequences at a time that each peer tries."""
BESIDE_BEST, OF_LIMIT = 1.15, 0.75
"""Goals, of which the smaller counts: the ratio to the best peer, and the share of the limit."""
_COMPARED = 12
"""Requests whose tokens are compared with those of transformers' `generate`."""
_PROGRAMS = Path(__file__).with_name("offline")


@dataclass(frozen=True)
class Row:
    """One setting of one engine."""

    engine: str
    setting: str
    dtype: str
    kv_dtype: str
    tokens_s: float
    """Output tokens per second, the median of the rounds."""
    ours_over_it: float | None
    """The median ratio of neighbouring runs; None for ours."""
    equal: int
    """Compared requests with transformers' own tokens."""


@dataclass(frozen=True)
class Bench:
    """The model and the requests that all engines run."""

    model: Path
    requests: Path
    dtype: str
    kv_dtype: str
    threads: int
    rounds: int
    tokens: int
    """Output tokens of all requests."""
    reference: Sequence[Sequence[int]]
    """Output tokens of the compared requests."""

    @contextmanager
    def started(self, engine: str, setting: str, envs: Path | None) -> Iterator["subprocess.Popen[str]"]:
        """Start an engine's program, which has loaded the model and run a few requests when it is yielded."""
        python, variables = sys.executable, {"OMP_NUM_THREADS": str(self.threads), "PYTHONPATH": os.getcwd()}
        if envs and engine not in ("exegpt", "transformers"):
            python = str(envs / engine / "bin" / "python")
            variables["PATH"] = f"{envs / engine / 'bin'}:{os.environ['PATH']}"
            del variables["PYTHONPATH"]
        if engine == "vllm" and envs:
            variables |= _vllm_variables(envs / engine, self.threads)
        arguments = [str(self.model), str(self.requests), setting, self.dtype, self.kv_dtype, str(self.threads)]
        process = subprocess.Popen(
            [python, str(_PROGRAMS / f"{engine}_offline.py"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | variables,
            start_new_session=True,
        )
        try:
            if _line(process) != "ready":
                raise SystemExit(f"{engine} doesn't start")
            yield process
        finally:
            with suppress(ProcessLookupError):  # its own processes, too, which outlive it (vLLM's hold gigabytes)
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)

    def run(self, process: "subprocess.Popen[str]") -> tuple[float, int]:
        """Let a program run all requests; return its output tokens per second, and how many compared ones are equal."""
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
        done = _line(process)
        assert isinstance(done, dict)
        generated = sum(map(len, done["outputs"]))
        if generated != self.tokens:
            raise SystemExit(f"{process.args!r} generated {generated} tokens, not {self.tokens}")
        equal = sum(list(a) == list(b) for a, b in zip(self.reference, done["outputs"], strict=False))
        return self.tokens / done["seconds"], equal


def _vllm_variables(env: Path, threads: int) -> dict[str, str]:
    """Return what vLLM's build for CPUs needs: its threads, memory, and libraries loaded before all others."""
    libraries = [
        *sorted((env / "lib").glob("libiomp5.so")),
        *sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")),
    ]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "3",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": " ".join(map(str, libraries)),
    }


def _line(process: "subprocess.Popen[str]") -> object:
    """Return the next line of JSON that a program prints; other lines are its log."""
    assert process.stdout
    for line in process.stdout:
        try:
            return json.loads(line)
        except json.JSONDecodeError:
            continue
    raise SystemExit(f"{process.args!r} has ended (exit code {process.wait()})")


def measure(bench: Bench, schedules: Mapping[str, Path], peers: Mapping[str, Sequence[str]], envs: Path) -> list[Row]:
    """Run ours at each schedule, then its fastest in turns with each setting of each peer."""
    rows = []
    for text, path in schedules.items():
        with bench.started("exegpt", str(path), None) as process:
            runs = [bench.run(process) for _ in range(bench.rounds)]
        rows.append(_row(bench, "exegpt", text, runs, None))
    best = max(rows, key=lambda row: row.tokens_s)
    with bench.started("exegpt", str(schedules[best.setting]), None) as ours:
        for engine, settings in peers.items():
            for setting in settings:
                with bench.started(engine, setting, envs) as theirs:
                    pairs = [(bench.run(ours), bench.run(theirs)) for _ in range(bench.rounds)]
                ratio = statistics.median(mine[0] / other[0] for mine, other in pairs)
                rows.append(_row(bench, engine, setting, [other for _, other in pairs], ratio))
    return rows


def _row(bench: Bench, engine: str, setting: str, runs: Sequence[tuple[float, int]], ratio: float | None) -> Row:
    tokens_s, equal = statistics.median(run[0] for run in runs), min(run[1] for run in runs)
    row = Row(engine, setting, bench.dtype, bench.kv_dtype, tokens_s, ratio, equal)
    print(row, file=sys.stderr, flush=True)
    return row


def limit_tokens_s(
    spec: ModelSpec, requests: Sequence[Request], dtype: str, kv_dtype: str, flops_s: float, bytes_s: float
) -> float:
    """Return the output tokens per second that a machine's rates allow.

    Each token but a request's last passes through all layers, and attends to those before it; each output token needs a
    row of the head. Weights are read once for each token of the longest output, keys and values once for each token.
    """
    from xcore.specs.model import BYTES

    matrices, head = sum(rows * columns for rows, columns in spec.layer_matrices()), spec.vocab * spec.hidden
    flops = moved = 0.0
    for request in requests:
        inputs, outputs = len(request.prompt_ids), request.max_tokens
        tokens = inputs + outputs - 1
        attended, seen = tokens * (tokens + 1) / 2, sum(range(inputs + 1, tokens + 1))
        flops += 2.0 * tokens * spec.layers * matrices + 2.0 * outputs * head
        flops += 4.0 * attended * spec.layers * spec.heads * spec.head_size
        moved += seen * spec.layers * spec.kv_bytes(1, kv_dtype)
    moved += max(r.max_tokens for r in requests) * (spec.layers * matrices + head) * BYTES[dtype]
    return sum(r.max_tokens for r in requests) / max(flops / flops_s, moved / bytes_s)


def _reference(model: Path, dtype: str, requests: Sequence[Request]) -> list[list[int]]:
    """Return the tokens of transformers' `generate`, one request after the other."""
    from exegpt.api import peers

    loaded = peers.load(model, dtype)
    return list(peers.generate_static(loaded, requests, 1).outputs)


def _schedules(folder: Path, asked: argparse.Namespace, model: Path) -> tuple[list[Request], dict[str, Path]]:
    """Return the requests, and the best schedules of the two best policies for them, in files, by what they say."""
    from xcore import document
    from xcore.console.schedule_text import schedule_text
    from xcore.requests.requests import random_requests
    from xprofiler.measure import measure_profile
    from xscheduler.list_search import tune_list
    from xscheduler.search_problem import Limits
    from xscheduler.setting_search import ranked, search_schedule
    from xscheduler.settings import find_setting

    kv_dtype = asked.kv_dtype
    measure_profile(model, asked.dtype, kv_dtype=kv_dtype)
    setting = find_setting(str(model), "local", asked.workload, dtype=asked.dtype, kv_dtype=kv_dtype, device="cpu")
    lengths = setting.workload.draw(asked.requests, asked.seed, setting.model.longest_request)
    policies = ("static", "hybrid", "orca", "chunked", "rra")
    steady = search_schedule(setting, None, policies=policies)
    answer = tune_list(setting, steady, lengths, Limits(None), policies=policies)
    best: list[Schedule] = [other.schedule for other in ranked(answer) if other.schedule][:2]
    files = {schedule_text(schedule): folder / f"schedule-{place}.json" for place, schedule in enumerate(best)}
    for path, schedule in zip(files.values(), best, strict=True):
        document.write(path, schedule)
    return random_requests(lengths, setting.model.vocab, asked.seed), files


def compare(asked: argparse.Namespace, peers: Mapping[str, Sequence[str]], folder: Path) -> dict[str, object]:
    """Measure ours beside the peers, each with its settings; return it as JSON."""
    import torch

    from exegpt.api.demo import create_demo_model
    from xprofiler import machine
    from xrunner.models.weights import torch_dtype
    from xscheduler.settings import find_model

    torch.set_num_threads(asked.threads)
    model = asked.model or create_demo_model(folder / "model", 0)
    flops_s, bytes_s = machine.matrix_flops_s(dtype=torch_dtype(asked.dtype)), machine.read_bandwidth_bytes_s()
    requests, schedules = _schedules(folder, asked, model)
    written = folder / "requests.json"
    written.write_text(json.dumps([{"prompt_ids": r.prompt_ids, "max_tokens": r.max_tokens} for r in requests]))
    reference = _reference(model, asked.dtype, requests[:_COMPARED])
    tokens, kv_dtype = sum(r.max_tokens for r in requests), asked.kv_dtype or asked.dtype
    bench = Bench(model, written, asked.dtype, kv_dtype, asked.threads, asked.rounds, tokens, reference)
    rows = measure(bench, schedules, peers, asked.envs.resolve() if asked.envs else folder)
    limit = limit_tokens_s(find_model(str(model)), requests, asked.dtype, kv_dtype, flops_s, bytes_s)
    ratios = [row.ours_over_it for row in rows if row.ours_over_it is not None]
    return {
        "cpu": machine.cpu_name(),
        "model": model.name,
        "workload": asked.workload,
        "requests": len(requests),
        "input_tokens": sum(len(r.prompt_ids) for r in requests),
        "output_tokens": tokens,
        "threads": asked.threads,
        "matrix_flops_s": flops_s,
        "read_bandwidth_bytes_s": bytes_s,
        "limit_tokens_s": limit,
        "rows": [asdict(row) for row in rows],
        "share_of_limit": max(row.tokens_s for row in rows if row.engine == "exegpt") / limit,
        "over_best_peer": min(ratios, default=None),
    }


def show(comparison: dict[str, object]) -> None:
    """Print the table and both goals."""
    title = "{model}, task {workload}, {requests} requests, {input_tokens} input and {output_tokens} output tokens"
    rows = comparison["rows"]
    assert isinstance(rows, list)
    lines = [
        [
            row["engine"],
            row["setting"],
            f"{row['dtype']} / {row['kv_dtype']}",
            f"{row['tokens_s']:.0f}",
            "–" if row["ours_over_it"] is None else f"{row['ours_over_it']:.2f}",
            str(row["equal"]),
        ]
        for row in rows
    ]
    columns = ("engine", "setting", "weights / KV", "tokens/s", "ours over it", f"equal of {_COMPARED}")
    output.table(columns, lines, title.format(**comparison))
    rates = "{cpu}, {threads} threads: {0:.0f} GFLOP/s, {1:.1f} GB/s read; the limit is {limit_tokens_s:.0f} tokens/s"
    flops_s, bytes_s = (float(str(comparison[key])) / 1e9 for key in ("matrix_flops_s", "read_bandwidth_bytes_s"))
    print(rates.format(flops_s, bytes_s, **comparison))
    print(f"share of the limit: {comparison['share_of_limit']:.2f} (goal {OF_LIMIT})")
    if comparison["over_best_peer"] is not None:
        print(f"over the best peer: {comparison['over_best_peer']:.2f} (goal {BESIDE_BEST}; one of both is enough)")


def main() -> int:
    """Measure and print. 0 where one of both goals is reached, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", default="", help=f"any of {','.join(SETTINGS)}")
    parser.add_argument("--envs", type=Path, help="folder with an environment for each peer, named as the peer")
    parser.add_argument("--settings", default="", help="settings that an earlier run found: vllm=64,openvino=256")
    parser.add_argument("--model", type=Path, help="a model's directory; default: the demo's")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--kv-dtype", choices=("fp32", "bf16", "int8"), help="of keys and values; default: the dtype")
    parser.add_argument("--workload", default="T")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    for name in ("requests", "rounds", "threads"):
        if getattr(asked, name) < 1:
            parser.error(f"--{name} {getattr(asked, name)}: at least 1")
    peers = _peers(asked, parser)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EXEGPT_CACHE"] = folder  # measured now: a profile of a busy machine may lie in the usual one
        comparison = compare(asked, peers, Path(folder))
    if asked.json:
        print(json.dumps(comparison, indent=2))
    else:
        show(comparison)
    ratio, share = comparison["over_best_peer"], comparison["share_of_limit"]
    assert isinstance(share, float)
    return 0 if share >= OF_LIMIT or (isinstance(ratio, float) and ratio >= BESIDE_BEST) else 1


def _peers(asked: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, Sequence[str]]:
    """Return each peer with the settings that it tries; end the program for a bad option, before minutes of work."""
    peers: dict[str, Sequence[str]] = {name: SETTINGS.get(name, ()) for name in asked.peers.split(",") if name}
    if unknown := sorted(peers.keys() - SETTINGS.keys()):
        parser.error(f"--peers {','.join(unknown)}: choose from {','.join(SETTINGS)}")
    for pair in filter(None, asked.settings.split(",")):
        name, _, setting = pair.partition("=")
        if name not in peers or not setting.isdecimal():
            parser.error(f"--settings {pair}: write PEER=NUMBER with one of the --peers")
        peers[name] = (setting,)
    for name in peers:
        if name != "transformers" and not (asked.envs and (asked.envs / name / "bin" / "python").exists()):
            where = asked.envs / name if asked.envs else "--envs is missing"
            parser.error(f"--peers {name} needs an environment in a folder of --envs ({where}): see docs/engine.md")
        if name != "openvino" and asked.kv_dtype not in (None, asked.dtype):
            parser.error(f"--kv-dtype {asked.kv_dtype}: {name} runs here with the dtype of its weights alone")
    return peers


if __name__ == "__main__":
    sys.exit(main())
