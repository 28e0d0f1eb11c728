"""A schedule as the nearest flags of another engine."""

import math

from exegpt.builtin_models import HUB_IDS
from exegpt.errors import InputError
from exegpt.model import ModelSpec
from exegpt.schedule import Schedule

ENGINES = ("vllm",)
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "auto"}


def check_exportable(model: ModelSpec, engine: str) -> None:
    """InputError for a model that `engine` doesn't run."""
    if model.architecture == "t5":
        raise InputError(f"{engine} doesn't run encoder-decoders like '{model.name}': leave --export out.")


def export(schedule: Schedule, engine: str) -> tuple[str, str]:
    """The command line that comes nearest to `schedule` in `engine` (one of ENGINES), and what is lost."""
    residents, budget, lost = _nearest(schedule)
    model = schedule.model.spec
    flags = {
        "tensor-parallel-size": schedule.tp_degree or 1,
        "pipeline-parallel-size": len(schedule.stages),
        "data-parallel-size": schedule.replicas,
        "dtype": _DTYPES[schedule.dtype],
        "kv-cache-dtype": "fp8" if schedule.kv_dtype == "fp8" else "auto",
        "max-model-len": model.context,
        "max-num-seqs": residents,
        "max-num-batched-tokens": budget,
        "block-size": schedule.block_size,
        "num-gpu-blocks-override": schedule.kv_blocks,
        "gpu-memory-utilization": schedule.cluster.memory_fraction,
    }
    name = HUB_IDS.get(model.name) or model.name
    return f"vllm serve {name} " + " ".join(f"--{key} {value}" for key, value in flags.items()), lost


def _nearest(schedule: Schedule) -> tuple[int, int, str]:
    """Resident sequences and tokens per iteration of a token-budget engine, and what it doesn't do."""
    prompt = schedule.workload.input
    if schedule.policy == "chunked":
        return schedule.max_num_seqs or 1, schedule.max_num_batched_tokens or 1, "nothing is lost"
    if schedule.policy == "orca":
        residents = schedule.max_num_seqs or 1
        budget = residents + (schedule.prefills_per_step or 1) * prompt.quantile(0.99)
        return residents, budget, "prompts longer than the budget are encoded in pieces"
    if schedule.policy == "rra":
        residents = schedule.decode_batch or 1
        # B_E prompts every N_D iterations, spread evenly over them
        share = (schedule.encode_batch or 1) * prompt.mean / (schedule.decode_iterations or 1)
        return residents, residents + math.ceil(share), "prompts are spread over iterations instead of sharing one"
    residents = schedule.encode_batch or 1
    return residents, residents * prompt.max, "finished sequences leave at once instead of with their batch"
