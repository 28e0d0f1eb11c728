"""Options that several commands share, so that each has one name, one meaning and one help text."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exegpt.options.values import load_plugins

if TYPE_CHECKING:
    from xscheduler.ordering import OrderChoice

MODEL_HELP = "A built-in name (`exegpt list models`), its Hugging Face id, or a model directory."
MODEL = Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP)]
MODEL_DIRECTORY = Annotated[str, typer.Option("--model", "-m", help="A model directory in the Hugging Face layout.")]
CLUSTER_HELP = "A cluster: local, 4xA40, 2x8xA100-80GB, or a YAML file."
WORKLOAD = Annotated[
    str | None,
    typer.Option("--workload", "-w", help="A task (S, T, G, C1, C2), fixed lengths (2048/256), or a trace file."),
]
PROFILE = Annotated[
    str | None,
    typer.Option(
        "--profile",
        "-p",
        help="A profile file, or roofline. Default: a stored profile that matches, else the roofline.",
    ),
]
PROFILES = Annotated[
    list[str] | None,
    typer.Option(
        "--profile",
        "-p",
        help="A profile file, or roofline; with several models, NAME=FILE for each. Default: a stored profile that "
        "matches, else the roofline.",
    ),
]
RUN_DTYPE = Annotated[
    str | None, typer.Option("--dtype", help="fp32, bf16 or fp16. Default: fp32 on the CPU, bf16 on a GPU.")
]
KV_DTYPE = Annotated[
    str | None,
    typer.Option("--kv-dtype", help="The dtype of keys and values. Default: that of --dtype; bf16 for fp8 weights."),
]
COLUMNS = Annotated[
    str | None,
    typer.Option(
        "--columns",
        help="A trace's columns: input=NAME,output=NAME[,arrival=NAME]. Add a unit to the arrival: arrival=NAME:ms (or "
        "s, us, ns, min, h, date). Prompts' identities: prompt_ids=, hash_ids=, prefix_id= with prefix_tokens=, "
        "session_id=.",
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
ADMISSION_HELP = (
    "reserve: a request waits until KV blocks for its maximum length are free. grow: a request gets blocks as it needs "
    "them; when none are left, the newest request is preempted."
)
ADMISSION = Annotated[str | None, typer.Option("--admission", help=ADMISSION_HELP + " Default: reserve.")]
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
    typer.Option("--starvation-guard", help="Promote a request that waited for 200 consecutive steps."),
]
RATE = Annotated[str | None, typer.Option("--rate", help="The rate of Poisson arrivals, like 5/s.")]
SEED = Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="The seed of all random numbers.")]
THREADS = Annotated[
    int | None, typer.Option("--threads", min=1, max=1024, help="The number of CPU threads. Default: one per core.")
]
DEVICE = Annotated[
    str | None, typer.Option("--device", help="cpu or cuda. Default: a GPU if there is one, else the CPU.")
]
LATENCY_BOUND_HELP = "The latency bound: 5s, 250ms, 2m or inf."
POLICY = Annotated[str | None, typer.Option("--policy", help="Only these policies, separated by commas.")]
SCHEDULE_HELP = "A schedule file, written by `exegpt tune --out`."
SCHEDULE = Annotated[Path | None, typer.Option("--schedule", "-s", help=SCHEDULE_HELP)]
PRICE_HELP = "A YAML file with the price of a device-hour for each device kind."
PLUGIN = Annotated[
    list[Path] | None,
    typer.Option("--plugin", callback=load_plugins, is_eager=True, help="A Python file that defines a policy."),
]
REPORT = Annotated[Path | None, typer.Option("--report", help="Write an HTML report to this file.")]


@dataclass(frozen=True, kw_only=True)
class JsonOption:
    """The format of the output."""

    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False


@dataclass(frozen=True, kw_only=True)
class PluginOptions(JsonOption):
    """Policies of the user's own, and the format of the output."""

    plugin: PLUGIN = None


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """How a trace file is read."""

    columns: COLUMNS = None
    scale_to_context: SCALE_TO_CONTEXT = False


@dataclass(frozen=True, kw_only=True)
class ProblemOptions:
    """What a schedule is for: a model on a cluster with a workload, and a profile that predicts it."""

    model: MODEL = None
    cluster: Annotated[str | None, typer.Option("--cluster", "-c", help=CLUSTER_HELP)] = None
    workload: WORKLOAD = None
    profile: PROFILES = None


@dataclass(frozen=True, kw_only=True)
class PredictionOptions:
    """The numbers' formats and the engine that predictions assume."""

    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="bf16, fp16, fp32 or fp8. Default: the checkpoint's own; fp32 on CPUs."),
    ] = None
    kv_dtype: KV_DTYPE = None
    memory_fraction: Annotated[
        float | None,
        typer.Option(
            "--gpu-memory-fraction", help="The usable share of a device's memory. Default: the engine's, 0.92 for vllm."
        ),
    ] = None
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            help="The engine whose time and memory predictions include: vllm (0.14 and later; the default), vllm-0.11, "
            "sglang, tensorrt-llm, exegpt, paper (as in the ExeGPT paper), or none (the default for this machine). "
            "Policies that it can't run are predicted with exegpt.",
        ),
    ] = None
    front_end: Annotated[
        str | None,
        typer.Option(
            "--front-end",
            help="The time of each request outside the engine, for HTTP and tokenisation (13ms); a part of TTFT and "
            "latency. Default: the engine's, 7ms for vllm.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """What this machine runs on."""

    device: DEVICE = None
    attention: Annotated[
        str | None,
        typer.Option(
            "--attention",
            help="The attention kernels on a GPU: triton (default), flashinfer (pip install 'exegpt[gpu-fast]'), or "
            "auto: FlashInfer if it is installed and supports the model's heads.",
        ),
    ] = None
    threads: THREADS = None


@dataclass(frozen=True, kw_only=True)
class OrderOptions:
    """The order of waiting requests."""

    order: ORDER = None
    starvation_guard: STARVATION_GUARD = False
    ranker: Annotated[
        Path | None,
        typer.Option("--ranker", help="The ranker for --order learned, a file written by `exegpt rank train`."),
    ] = None

    @property
    def order_choice(self) -> "OrderChoice":
        """The order that the options select; InputError for options that contradict each other."""
        from xscheduler.ordering import OrderChoice

        return OrderChoice.of(self.order, self.starvation_guard, self.ranker)


def _fix(what: str, most: int | None = None) -> object:
    """Return an option that fixes a control variable."""
    return typer.Option(min=1, max=most, help=f"Fix {what}")


@dataclass(frozen=True, kw_only=True)
class ControlOptions:
    """Control variables with fixed values."""

    encode_batch: Annotated[int | None, _fix("B_E, the number of prompts in a batch (RRA, WAA, static).")] = None
    decode_iterations: Annotated[int | None, _fix("N_D, the number of iterations between prefills (RRA).")] = None
    micro_batches: Annotated[int | None, _fix("B_m, the number of micro-batches in decoding (WAA, hybrid).")] = None
    encode_micro_batches: Annotated[int | None, _fix("the number of micro-batches in prefills (RRA, hybrid).")] = None
    max_num_seqs: Annotated[
        int | None,
        _fix("the maximum number of running sequences (chunked, orca). Default of simulate: the engine's."),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        _fix("the maximum number of tokens in an iteration (chunked). Default of simulate: the engine's.", 10_000_000),
    ] = None
    prefills_per_step: Annotated[
        int | None, _fix("the maximum number of prompts in an iteration (orca). Default of simulate: 1.")
    ] = None
    tp_degree: Annotated[
        int | None,
        _fix(
            "the tensor-parallel degree (WAA: of decoding). A replica's other devices are pipeline stages. Default of "
            "simulate: the largest."
        ),
    ] = None
    tp_gpus: Annotated[int | None, _fix("the number of devices in tensor-parallel groups.")] = None
    encode_devices: Annotated[int | None, _fix("the number of a replica's devices for prefill (WAA).")] = None
    encode_tp_degree: Annotated[int | None, _fix("the tensor-parallel degree of prefill (WAA).")] = None
    replicas: Annotated[
        int | None, _fix("the number of replicas, each on an equal part of the cluster. Default of simulate: 1.")
    ] = None

    @property
    def fixed(self) -> dict[str, int]:
        """The control variables that the user passed."""
        values = ((field.name, getattr(self, field.name)) for field in fields(ControlOptions))
        return {name: value for name, value in values if value is not None}
