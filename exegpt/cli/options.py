"""Options that several commands share, so that each has one name, one meaning and one help text."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from xcore.errors import InputError

T = TypeVar("T")


def build(kind: type[T], typed: Mapping[str, Any]) -> T:
    """Return the options object `kind` (a dataclass) with the command's parameters of the same names."""
    return kind(**{field.name: typed[field.name] for field in fields(kind)})  # type: ignore[arg-type]


def only_model(models: list[str] | None, what: str) -> str:
    """Return the single model of a server or a run without a plan."""
    models = models or []
    if len(models) != 1:
        raise InputError(f"A {what} without --plan has one model, but --model is given {len(models)} times: pass one.")
    return models[0]


def only_profile(profiles: list[str] | None) -> str | None:
    """Return the single profile of a model; InputError for several."""
    if profiles and len(profiles) > 1:
        raise InputError(f"--profile is given for one model as {' and '.join(map(repr, profiles))}: pass one file.")
    return profiles[0] if profiles else None


def profile_files(profiles: list[str] | None) -> list[str]:
    """Return the files that `--profile` names, of one model or of several."""
    return [part.partition("=")[2] or part for text in profiles or () for part in (text, *text.split(","))]


def directories(models: list[str] | None) -> dict[str, str]:
    """Return directories by name, from `--model NAME=DIR` with --plan."""
    return named(models or (), "--model", "DIR")


def named(texts: Iterable[str], option: str, what: str) -> dict[str, str]:
    """Return files or folders by the names of the plan's models, from texts `NAME=PATH`."""
    paths: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise InputError(f"{option} {text} names no model: with --plan, pass {option} NAME={what}.")
        if paths.setdefault(name, path) != path:
            raise InputError(f"{option} has '{paths[name]}' and '{path}' for model '{name}': leave one of them out.")
    return paths


def load_plugins(files: list[Path] | None) -> list[Path] | None:
    """Register the policies of plug-in files before the command begins."""
    if files:
        from xcore.policies import plugins

        plugins.load(files)
    return files


PLUGIN = Annotated[
    list[Path] | None,
    typer.Option("--plugin", callback=load_plugins, is_eager=True, help="A Python file with a policy of your own."),
]
JSON = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
MODEL_HELP = "A built-in name (`exegpt list models`), its Hugging Face id, or a model directory."
MODEL = Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP)]
CLUSTER = Annotated[str | None, typer.Option("--cluster", "-c", help="local, 4xA40, 2x8xA100-80GB, or a YAML file.")]
WORKLOAD = Annotated[
    str | None,
    typer.Option("--workload", "-w", help="A task (S, T, G, C1, C2), fixed lengths (2048/256), or a trace file."),
]
PROFILE = Annotated[
    str | None,
    typer.Option(
        "--profile", "-p", help="A profile file, or roofline. Default: a stored profile that fits, else the roofline."
    ),
]
PROFILES = Annotated[
    list[str] | None,
    typer.Option(
        "--profile",
        "-p",
        help="A profile file, or roofline; of several models NAME=FILE for each. Default: a stored profile that fits, "
        "else the roofline.",
    ),
]
ENGINE = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="The engine whose time and memory are in predictions: vllm (0.14 and later; default), vllm-0.11, sglang, "
        "tensorrt-llm or exegpt; paper (the ExeGPT paper's), or none (default for this machine). Policies that it "
        "doesn't run are predicted with exegpt.",
    ),
]
FRONT_END = Annotated[
    str | None,
    typer.Option(
        "--front-end",
        help="Time of each request outside the engine, for HTTP and tokenising (13ms): part of TTFT and latency. "
        "Default: the engine's, 7ms for vllm.",
    ),
]
DTYPE = Annotated[
    str | None, typer.Option("--dtype", help="bf16, fp16, fp32 or fp8. Default: the checkpoint's own; fp32 on CPUs.")
]
RUN_DTYPE = Annotated[
    str | None, typer.Option("--dtype", help="fp32, bf16 or fp16. Default: fp32 on the CPU, bf16 on a GPU.")
]
DEVICE = Annotated[
    str | None, typer.Option("--device", help="cpu or cuda. Default: a GPU if there is one, else the CPU.")
]
ATTENTION = Annotated[
    str | None,
    typer.Option(
        "--attention",
        help="Attention kernels on a GPU: triton (default), flashinfer (pip install 'exegpt[gpu-fast]'), or auto: "
        "FlashInfer if it is installed and supports the model's heads.",
    ),
]
ADMISSION = Annotated[
    str | None,
    typer.Option(
        "--admission",
        help="reserve (default): a request waits until KV blocks for its maximum length are free; grow: it gets blocks "
        "as it needs them, and the request admitted last is preempted when none are left.",
    ),
]
PREFIX_CACHING = Annotated[
    bool,
    typer.Option(
        "--prefix-caching",
        help="Reuse KV blocks for requests that begin with the same tokens, and for preempted ones (orca, chunked).",
    ),
]
ORDER = Annotated[
    str | None,
    typer.Option(
        "--order",
        help="Order of admission: fcfs (default), fcfs-app, round-robin, mlfq, sjf, srtf, learned, product, "
        "doubling-budget, least-slack, edf or vtc (docs/multimodel.md).",
    ),
]
STARVATION_GUARD = Annotated[
    bool,
    typer.Option("--starvation-guard", help="Promote requests that 200 steps in a row have left out."),
]
RANKER = Annotated[
    Path | None, typer.Option("--ranker", help="The ranker for --order learned, a file written by `exegpt rank train`.")
]
KV_DTYPE = Annotated[
    str | None,
    typer.Option("--kv-dtype", help="The dtype of keys and values. Default: --dtype, and bf16 for weights in fp8."),
]
MEMORY_FRACTION = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory-fraction",
        help="Usable share of a device's memory. Default: the engine's, 0.92 for vllm.",
    ),
]
COLUMNS = Annotated[
    str | None,
    typer.Option(
        "--columns",
        help="A trace's columns: input=NAME,output=NAME[,arrival=NAME], with a unit arrival=NAME:ms (or s, us, ns, "
        "min, h, date); of prompts' identities prompt_ids=, hash_ids=, prefix_id= with prefix_tokens=, session_id=.",
    ),
]
SCALE_TO_CONTEXT = Annotated[
    bool,
    typer.Option(
        "--scale-to-context",
        help="Scale all lengths of a trace so that 99% of its rows fit the model's context. Default: longer rows are "
        "left out.",
    ),
]
RATE = Annotated[str | None, typer.Option("--rate", help="Poisson arrivals, like 5/s.")]
SEED = Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Seed of everything drawn at random.")]
THREADS = Annotated[int | None, typer.Option("--threads", min=1, max=1024, help="CPU threads. Default: one per core.")]
LATENCY_BOUND_HELP = "The latency bound: 5s, 250ms, 2m or inf."
BOUND = Annotated[
    str,
    typer.Option(
        "--bound",
        help="Who keeps the latency bound: a share of all requests (requests; also p99-queries), or a sequence of the "
        "99th-percentile output length, as in the ExeGPT paper (p99-length).",
    ),
]
PERCENTILE = Annotated[
    float, typer.Option("--percentile", help="Of the requests, the share in % that keeps each bound: 50 to 99.9.")
]
ENCODE_BATCH = Annotated[int | None, typer.Option(min=1, help="Fix B_E, the prompts of a batch (RRA, WAA, static).")]
DECODE_ITERATIONS = Annotated[int | None, typer.Option(min=1, help="Fix N_D, iterations between prefills (RRA).")]
MICRO_BATCHES = Annotated[int | None, typer.Option(min=1, help="Fix B_m, micro-batches of decoding (WAA, hybrid).")]
ENCODE_MICRO_BATCHES = Annotated[int | None, typer.Option(min=1, help="Fix encoding micro-batches (RRA, hybrid).")]
TP_DEGREE = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Fix the tensor-parallel degree (WAA: of decoding); a replica's remaining devices are pipeline stages. "
        "simulate's default: the largest.",
    ),
]
TP_GPUS = Annotated[int | None, typer.Option(min=1, help="Fix the devices in tensor-parallel groups.")]
ENCODE_DEVICES = Annotated[int | None, typer.Option(min=1, help="Fix a replica's devices that encode (WAA).")]
ENCODE_TP_DEGREE = Annotated[int | None, typer.Option(min=1, help="Fix their tensor-parallel degree (WAA).")]
MAX_NUM_SEQS = Annotated[
    int | None,
    typer.Option(min=1, help="Fix the most running sequences (chunked, orca). simulate's default: the engine's."),
]
MAX_NUM_BATCHED_TOKENS = Annotated[
    int | None,
    typer.Option(
        min=1, max=10_000_000, help="Fix the tokens of an iteration (chunked). simulate's default: the engine's."
    ),
]
PREFILLS_PER_STEP = Annotated[
    int | None, typer.Option(min=1, help="Fix the prompts of an iteration (orca). simulate's default: 1.")
]
REPLICAS = Annotated[
    int | None,
    typer.Option(min=1, help="Fix the copies of the model, each on an equal part. simulate's default: 1."),
]
FIXED = (
    *("encode_batch", "decode_iterations", "micro_batches", "encode_micro_batches", "tp_degree", "tp_gpus"),
    *("encode_devices", "encode_tp_degree", "max_num_seqs", "max_num_batched_tokens", "prefills_per_step", "replicas"),
)
"""Control variables that are options of commands under the same names."""


def fixed(typed: Mapping[str, Any]) -> dict[str, int]:
    """Return the control variables that the user passed."""
    return {name: typed[name] for name in FIXED if typed.get(name) is not None}


POLICY = Annotated[str | None, typer.Option("--policy", help="Only these policies, separated by commas.")]
SCHEDULE_HELP = "A schedule file, written by `exegpt tune --out`."
SCHEDULE = Annotated[Path | None, typer.Option("--schedule", "-s", help=SCHEDULE_HELP)]
REQUIRED_SCHEDULE = Annotated[Path, typer.Option("--schedule", "-s", help=SCHEDULE_HELP)]
MODEL_DIRECTORY = Annotated[str, typer.Option("--model", "-m", help="A model directory in the Hugging Face layout.")]
REPORT = Annotated[Path | None, typer.Option("--report", help="Write an HTML report to this file.")]
