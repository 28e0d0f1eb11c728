"""Options that several commands share, so that each has one name, one meaning and one help text."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from exegpt.options.option_record import option, required
from exegpt.options.values import load_plugins, only_ranker

if TYPE_CHECKING:
    from xscheduler.ordering import OrderChoice

MODEL_HELP = "A built-in name (`exegpt list models`), its Hugging Face id, or a model directory."
MODEL = option(None, MODEL_HELP, "-m")
MODEL_DIRECTORY = required("A model directory in the Hugging Face layout.", "-m")
CLUSTER_HELP = "A cluster: local, 4xA40, 2x8xA100-80GB, or a YAML file."
WORKLOAD = option(None, "A task (S, T, G, C1, C2), fixed lengths (2048/256), or a trace file.", "-w")
PROFILE = option(None, "A profile file, or roofline. Default: a stored profile that matches, else the roofline.", "-p")
PROFILES = option(
    None,
    "A profile file, or roofline; with several models, NAME=FILE for each. Default: a stored profile that "
    "matches, else the roofline.",
    "-p",
)
RUN_DTYPE = option(
    None,
    "The dtype: fp32, bf16, fp16 or auto. Default: auto: bf16 on a GPU, and for checkpoints of 16 bits on a CPU that "
    "computes in bf16; else fp32.",
)
EXPERT_PARALLEL: bool = option(
    False,
    "Give each device of a tensor-parallel group whole experts. Default: a part of each, where the widths allow that; "
    "tune tries both.",
)
ATTENTION_DP: int | None = option(
    None,
    "Attention data parallelism: so many GPUs share the experts, and each has attention for its own sequences. "
    "Default: 1, none; tune tries all groups, unless --expert-parallel or a number is passed.",
)
KV_DTYPE = option(None, "The dtype of keys and values. Default: that of --dtype; bf16 for weights of fewer bits.")
RUN_KV_DTYPE = option(
    None, "The dtype of keys and values: that of --dtype (the default), or int8 with a scale per head, on CPUs."
)
COLUMNS = option(
    None,
    "A trace's columns: input=NAME,output=NAME[,arrival=NAME]. Add a unit to the arrival: arrival=NAME:ms (or "
    "s, us, ns, min, h, date). Prompts' identities: prompt_ids=, hash_ids=, prefix_id= with prefix_tokens=, "
    "session_id=.",
)
SCALE_TO_CONTEXT = option(
    False,
    "Scale all lengths of a trace so that 99% of its rows fit the model's context. Default: longer rows are left out.",
)
ADMISSION_HELP = (
    "reserve: a request waits until KV blocks for its maximum length are free. grow: a request gets blocks as it needs "
    "them; when none are left, the newest request is preempted."
)
ADMISSION = option(None, ADMISSION_HELP + " Default: reserve.")
ORDER_HELP = (
    "Order of admission: fcfs (default), fcfs-app, round-robin, mlfq, sjf, srtf, learned, product, "
    "doubling-budget, least-slack, edf, gittins, demand-slack or vtc (docs/multimodel.md)."
)
GRAPHS = option(
    None,
    "Demand graphs of applications, written by `exegpt graphs learn`: for --order gittins and demand-slack, and for "
    "prewarm.",
)
WARM_PREFIXES = option(
    None,
    "Which cached prefixes are kept. lru (default): the latest; epwq: also those of waiting requests; prewarm: also "
    "those of the calls that --graphs expect.",
)
KNOB = option(
    None,
    "With prewarm: the least probability that what is kept or loaded is used. A smaller value begins earlier, and is "
    "more often in vain. Default: 0.5.",
    min=0.0,
    max=1.0,
)
STARVATION_GUARD = option(False, "Promote a request that waited for 200 consecutive steps.")
PREEMPT = option(
    None,
    "How running requests give way to waiting ones that come before them in the order: none (default), recompute, or "
    "swap, which copies their keys and values to the host and back (orca, chunked).",
)
SWAP_BLOCKS = option(
    None,
    "--preempt swap: the most KV blocks on the host, for each device. Default: as many as the cache has, up to 4 GiB.",
    min=1,
    max=1_000_000_000,
)
RATE_HELP = "The rate of Poisson arrivals, like 5/s."
RATE = option(None, RATE_HELP)
SEED = option(0, "The seed of all random numbers.", min=0, max=2**63 - 1)
THREADS = option(None, "The number of CPU threads. Default: one per core.", min=1, max=1024)
DEVICE = option(None, "The device: cpu or cuda. Default: a GPU if there is one, else the CPU.")
LATENCY_BOUND_HELP = "The latency bound: 5s, 250ms, 2m or inf."
POLICY = option(None, "Only these policies, separated by commas.")
SCHEDULE_HELP = "A schedule file, written by `exegpt tune --out`."
SCHEDULE = option(None, SCHEDULE_HELP, "-s")
PRICE_HELP = "A YAML file with the price of a device-hour for each device kind."
PLUGIN = option(None, "A Python file that defines a policy.", callback=load_plugins, is_eager=True)
REPORT = option(None, "Write an HTML report to this file.")


@dataclass(frozen=True, kw_only=True)
class JsonOption:
    """The format of the output."""

    json: bool = option(False, "Print one JSON document on standard output.")


@dataclass(frozen=True, kw_only=True)
class PluginOptions(JsonOption):
    """Policies from the user's plug-in files, and the format of the output."""

    plugin: list[Path] | None = PLUGIN


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """How a trace file is read."""

    columns: str | None = COLUMNS
    scale_to_context: bool = SCALE_TO_CONTEXT


@dataclass(frozen=True, kw_only=True)
class ProblemOptions:
    """The setting of a schedule: a model on a cluster with a workload, and the profile for predictions."""

    model: str | None = MODEL
    cluster: str | None = option(None, CLUSTER_HELP, "-c")
    workload: str | None = WORKLOAD
    profile: list[str] | None = PROFILES


@dataclass(frozen=True, kw_only=True)
class PrefixHitOptions:
    """The option for a share of cached prompt tokens."""

    prefix_hit: float | None = option(
        None,
        "The share of the prompts' tokens that is found in the prefix cache, like 0.6, as if all prompts began with "
        "one text (orca, chunked). Default: none, or as the trace says with --prefix-caching.",
        min=0.0,
        max=0.99,
    )


@dataclass(frozen=True, kw_only=True)
class PredictionOptions:
    """The numbers' formats and the engine that predictions assume."""

    dtype: str | None = option(
        None,
        "The weights' dtype: bf16, fp16, fp32, fp8, int8, int4, w8a16, mxfp4 or nvfp4. Default: the checkpoint's own; "
        "fp32 on CPUs.",
    )
    kv_dtype: str | None = KV_DTYPE
    memory_fraction: float | None = option(
        None, "The usable share of a device's memory. Default: the engine's, 0.92 for vllm."
    )
    expert_parallel: bool = EXPERT_PARALLEL
    attention_dp: int | None = ATTENTION_DP
    engine: str | None = option(
        None,
        "The engine whose time and memory predictions include: vllm (0.14 and later; the default), vllm-0.11, "
        "sglang, tensorrt-llm, exegpt, paper (as in the ExeGPT paper), or none (the default for this machine). "
        "Policies that it can't run are predicted with exegpt.",
    )
    front_end: str | None = option(
        None,
        "The time of each request outside the engine, for HTTP and tokenisation (13ms); a part of TTFT and "
        "latency. Default: the engine's, 7ms for vllm.",
    )


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """Speculative decoding: how many tokens are drafted, by what, and how many of them are accepted."""

    draft_acceptance: str | None = option(
        None,
        "Speculative decoding: the acceptance of draft tokens. A rate (0.7), rates by position as in engines' logs "
        "(0.8,0.6,0.5), or a YAML file with the mean tokens per iteration by the number of draft tokens (FILE, or "
        "FILE:NAME for one of several curves).",
    )
    num_speculative_tokens: str | None = option(
        None, "Draft tokens of each sequence in a decode iteration, or auto: tune tries 0 to 8 (the default of tune)."
    )
    draft_model: str | None = option(
        None, "A separate draft model: a built-in name or a model directory. Default: layers of the model draft."
    )
    draft_layers: float | None = option(
        None,
        "The layers that draft, as a number of the model's decoder layers: 1 for an MTP or EAGLE head (default).",
        min=0.01,
        max=1000.0,
    )


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """Sessions in a closed loop."""

    agents: int | None = option(
        None,
        "A closed loop: so many sessions at a time, each of whose turns begins when the last one has ended. Sessions "
        "are those of the trace (session_id, conversation_id, chat_id, run), or drawn.",
        min=1,
        max=100_000,
    )
    turns: int | None = option(
        None, "With --agents: the turns of a drawn session, whose prompts grow. Default: 1.", min=1, max=1000
    )
    tool_time: str | None = option(
        None,
        "With --agents: the time from the end of a turn to the next, like 2s, where the trace has no after_s. "
        "Default: 0.",
    )


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The device and the threads of a run on this machine."""

    device: str | None = DEVICE
    attention: str | None = option(
        None,
        "The attention kernels on a GPU: triton (default), flashinfer (pip install 'exegpt[gpu-fast]'), or "
        "auto: FlashInfer if it is installed and supports the model's heads.",
    )
    threads: int | None = THREADS


@dataclass(frozen=True, kw_only=True)
class AdjustOptions:
    """Dynamic adjustment of encoding batches."""

    adjust: float | None = option(
        None,
        "RRA, WAA: change the size of the next batch, and choose its prompts, so that its tokens and the running "
        "sequences deviate by at most this share of a batch. Default: the schedule's, else 0.05.",
        min=0.0,
        max=1.0,
    )
    no_adjust: bool = option(False, "RRA, WAA: encode the first B_E prompts, whatever their lengths.")


@dataclass(frozen=True, kw_only=True)
class ShuffleOptions:
    """The randomisation of a list of requests."""

    shuffle: int | None = option(
        None,
        "Shuffle each so many successive requests of a list that is there at the start. Where lengths change along the "
        "list, all batches then get lengths like those of the whole.",
        min=2,
        max=100_000_000,
    )


@dataclass(frozen=True, kw_only=True)
class PlanOrderOptions:
    """The order of waiting requests, of one model or of a plan's."""

    order: str | None = option(None, ORDER_HELP)
    ranker: list[str] | None = option(
        None,
        "The ranker for --order learned, a file written by `exegpt rank train`; where a plan takes it, NAME=FILE for "
        "each model.",
    )


@dataclass(frozen=True, kw_only=True)
class OrderOptions(PlanOrderOptions):
    """The order of waiting requests, and what happens to running ones."""

    starvation_guard: bool = STARVATION_GUARD
    graphs: Path | None = GRAPHS
    warm_prefixes: str | None = WARM_PREFIXES
    knob: float | None = KNOB
    preempt: str | None = PREEMPT
    swap_blocks: int | None = SWAP_BLOCKS

    @property
    def order_choice(self) -> "OrderChoice":
        """The order that the options select; InputError for options that contradict each other."""
        from xscheduler.ordering import OrderChoice

        further = (self.warm_prefixes, self.knob, self.preempt, self.swap_blocks)
        ranker = only_ranker(self.ranker)
        return OrderChoice.of(self.order, self.starvation_guard, ranker, None, self.graphs, *further)


def _fix(what: str, most: int | None = None) -> int | None:
    """Return the option that fixes a control variable."""
    return option(None, f"Fix {what}", min=1, max=most)


@dataclass(frozen=True, kw_only=True)
class ControlOptions:
    """Control variables with fixed values."""

    encode_batch: int | None = _fix("B_E, the number of prompts in a batch (RRA, WAA, static).")
    decode_iterations: int | None = _fix("N_D, the number of iterations between prefills (RRA).")
    micro_batches: int | None = _fix("B_m, the number of micro-batches in decoding (WAA, hybrid).")
    encode_micro_batches: int | None = _fix("the number of micro-batches in prefills (RRA, hybrid).")
    max_num_seqs: int | None = _fix(
        "the maximum number of running sequences (chunked, orca). Default of simulate: the engine's."
    )
    max_num_batched_tokens: int | None = _fix(
        "the maximum number of tokens in an iteration (chunked). Default of simulate: the engine's.", 10_000_000
    )
    prefills_per_step: int | None = _fix(
        "the maximum number of prompts in an iteration (orca). Default of simulate: 1."
    )
    tp_degree: int | None = _fix(
        "the tensor-parallel degree (WAA: of decoding). A replica's other devices are pipeline stages. Default of "
        "simulate: the largest."
    )
    tp_gpus: int | None = _fix("the number of devices in tensor-parallel groups.")
    encode_devices: int | None = _fix("the number of a replica's devices for prefill (WAA).")
    encode_tp_degree: int | None = _fix("the tensor-parallel degree of prefill (WAA).")
    replicas: int | None = _fix("the number of replicas, each on an equal part of the cluster. Default of simulate: 1.")

    @property
    def fixed(self) -> dict[str, int]:
        """The control variables that the user passed."""
        values = ((field.name, getattr(self, field.name)) for field in fields(ControlOptions))
        return {name: value for name, value in values if value is not None}
