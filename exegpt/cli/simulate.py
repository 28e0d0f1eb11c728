"""`exegpt simulate`: the estimate and timeline of a schedule, or of a running engine's settings."""

from pathlib import Path
from typing import Annotated, Any

import typer

from exegpt.cli import options

PLAN = Annotated[Path | None, typer.Option(help="A plan of several models; its --replay trace has a column `model`.")]
TIMELINE = Annotated[Path | None, typer.Option(help="Write a timeline for Perfetto to this file.")]
REPLAY = Annotated[
    str | None,
    typer.Option(
        help="Simulate the requests of this trace one by one. With --prefix-caching, prompts begin alike as its "
        "columns say: hash_ids, prompt_ids, prefix_id with prefix_tokens, session_id or conversation_id, chat_id "
        "with parent_chat_id."
    ),
]
OUT = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Write each replayed request's times to this file, JSON lines."),
]
COMMAND = Annotated[
    str | None,
    typer.Option(help="A launch command of vLLM or SGLang, whose settings are simulated: 'vllm serve M …'."),
]
POLICY = Annotated[
    str | None, typer.Option(help="The policy, with its control variables. Default: chunked, as in vLLM.")
]
KV_BLOCKS = Annotated[
    int | None, typer.Option(min=1, help="KV blocks on each stage. Default: as many as fit into memory.")
]
BLOCK_SIZE = Annotated[int | None, typer.Option(min=1, help="Tokens per KV block. Default: 16.")]
PREFIX_CACHING = Annotated[
    bool | None,
    typer.Option(
        "--prefix-caching/--no-prefix-caching",
        help="Reuse KV blocks for requests that begin with the same tokens, and for preempted ones (orca, chunked)."
        " Default: off, or that of --engine.",
    ),
]
RANKER_TAU = Annotated[
    float | None,
    typer.Option(help="Kendall's tau of the ranker that --order learned simulates, up to 1. Default: 0.55."),
]


def simulate(
    schedule: options.SCHEDULE = None,
    plan: PLAN = None,
    timeline: TIMELINE = None,
    replay: REPLAY = None,
    out: OUT = None,
    command: COMMAND = None,
    rate: options.RATE = None,
    seed: options.SEED = 0,
    profile: options.PROFILES = None,
    policy: POLICY = None,
    model: options.MODEL = None,
    cluster: options.CLUSTER = None,
    workload: options.WORKLOAD = None,
    max_num_seqs: options.MAX_NUM_SEQS = None,
    max_num_batched_tokens: options.MAX_NUM_BATCHED_TOKENS = None,
    prefills_per_step: options.PREFILLS_PER_STEP = None,
    tp_degree: options.TP_DEGREE = None,
    replicas: options.REPLICAS = None,
    encode_batch: options.ENCODE_BATCH = None,
    decode_iterations: options.DECODE_ITERATIONS = None,
    micro_batches: options.MICRO_BATCHES = None,
    encode_micro_batches: options.ENCODE_MICRO_BATCHES = None,
    tp_gpus: options.TP_GPUS = None,
    encode_devices: options.ENCODE_DEVICES = None,
    encode_tp_degree: options.ENCODE_TP_DEGREE = None,
    kv_blocks: KV_BLOCKS = None,
    block_size: BLOCK_SIZE = None,
    admission: options.ADMISSION = None,
    prefix_caching: PREFIX_CACHING = None,
    order: options.ORDER = None,
    starvation_guard: options.STARVATION_GUARD = False,
    ranker_tau: RANKER_TAU = None,
    dtype: options.DTYPE = None,
    kv_dtype: options.KV_DTYPE = None,
    memory_fraction: options.MEMORY_FRACTION = None,
    engine: options.ENGINE = None,
    front_end: options.FRONT_END = None,
    columns: options.COLUMNS = None,
    scale_to_context: options.SCALE_TO_CONTEXT = False,
    threads: options.THREADS = None,
    plugin: options.PLUGIN = None,
    json: options.JSON = False,
) -> None:
    """Predict the performance of a schedule or of engine settings: throughput, latencies, memory, and a timeline.

    Example: exegpt simulate --schedule schedule.json --timeline trace.json

    Example: exegpt simulate --command "vllm serve meta-llama/Llama-3.1-8B --max-num-seqs 128" --cluster 1xH100-SXM
    --workload 2048/256 --rate 5/s

    Example: exegpt simulate --model opt-13b --cluster 4xA40 --policy rra --encode-batch 40 --decode-iterations 16

    Example: exegpt simulate --model llama-3.1-8b --cluster 1xH100-SXM --replay trace.jsonl --prefix-caching --out
    requests.jsonl
    """
    asked = dict(locals())
    from exegpt.api.simulate import SimulateOptions
    from exegpt.api.simulate import simulate as predict
    from xcore.choices import check_columns
    from xcore.console import output
    from xcore.console.schedule_text import schedule_text
    from xcore.files import check_distinct, check_output
    from xrunner.threads import set_threads
    from xscheduler.engine_settings import EngineSettings
    from xscheduler.ordering import OrderChoice

    check_output(timeline)
    check_output(out)
    check_distinct((timeline, out), (schedule, plan, workload, *options.profile_files(profile), replay, cluster))
    if plan:
        return _simulate_plan(asked)
    asked["profile"] = options.only_profile(profile)
    set_threads(threads)
    check_columns(columns, workload, replay, scale=scale_to_context)
    said, notes = _launched(command, asked) if command else (asked, ())
    engine_settings = EngineSettings.of(said)
    choice = OrderChoice.of(order, starvation_guard, tau=ranker_tau)
    own = {"engine_settings": engine_settings, "order": choice}
    prediction = predict(options.build(SimulateOptions, {"longest": None} | said | own))
    assumptions = list(dict.fromkeys((*notes, *prediction.assumptions)))
    if json:
        more: dict[str, Any] = {"profile_import": prediction.kernels.to_dict() if prediction.kernels else None}
        more |= {"assumptions": assumptions, "provenance": output.provenance(prediction.profile)}
        return output.emit(prediction.facts | more)
    output.notes(assumptions)
    output.table(prediction.columns, prediction.rows, schedule_text(prediction.schedule))
    for text in prediction.texts:
        print(text)


def _launched(command: str, asked: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the options with the settings of a launch command, and its notes.

    Raises InputError for an option that the command contains too.
    """
    from xcore.errors import InputError
    from xscheduler.launch_command import POLICY, read_launch

    launch = read_launch(command)
    if asked["schedule"]:
        raise InputError("--command and --schedule both say what is simulated: leave one of them out.")
    said = {"model": launch.model, "policy": POLICY, **launch.settings}
    for name in said:
        if asked.get(name) not in (None, False):
            option = f"--{'gpu-' if name == 'memory_fraction' else ''}{name.replace('_', '-')}"
            raise InputError(f"--command says what {option} says: leave {option} {asked[name]} out.")
    engine = asked["engine"] or launch.engine
    return asked | said | {"engine": engine, "longest": launch.longest}, launch.notes


def _simulate_plan(asked: dict[str, Any]) -> None:
    """Print the predicted performance of a plan's models; InputError for options that the plan determines."""
    from xcore.choices import check_columns
    from xcore.columns import parse_columns
    from xcore.console import output
    from xcore.errors import InputError
    from xcore.quantity import counted
    from xmulti.plans.simulate_plan import COLUMNS, simulate_plan

    own = {"plan", "plugin", "replay", "timeline", "json", "threads", "profile", "columns", "scale_to_context"}
    others = [name for name, value in asked.items() if name not in own and value not in (None, False)]
    if others:
        name = "gpu_memory_fraction" if others[0] == "memory_fraction" else others[0]
        raise InputError(f"--{name.replace('_', '-')} is for simulations without --plan: leave one of the two out.")
    replay = Path(asked["replay"]) if asked["replay"] else None
    scale = asked["scale_to_context"]
    check_columns(asked["columns"], asked["replay"], scale=scale)
    columns = parse_columns(asked["columns"]) if asked["columns"] else None
    prediction = simulate_plan(asked["plan"], replay, asked["timeline"], asked["profile"] or (), columns, scale)
    if asked["json"]:
        facts = {**prediction.facts, "assumptions": prediction.assumptions, "provenance": output.provenance()}
        return output.emit(facts)
    output.notes(prediction.assumptions)
    title = f"{prediction.plan.method}: {counted(len(prediction.rows), 'model')} on {prediction.plan.cluster.name}"
    output.table(COLUMNS, prediction.rows, title)
