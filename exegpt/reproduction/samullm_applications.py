"""SamuLLM's applications on its machine: eight A100-80GB in NVLink pairs (paper, section 5).

Timings and output lengths are SamuLLM's own where published. Stand-ins are named where they are used.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from exegpt.reproduction.public_data import public_data
from exegpt.reproduction.vllm_of_2024 import VLLM_OF_2024
from xcore.arrays import Array
from xcore.specs.builtin_models import builtin_config
from xcore.specs.cluster import parse_cluster
from xcore.specs.cost_table import CostTable, ModelCosts
from xcore.specs.engine_memory import DATA_SHEET
from xcore.specs.model import ModelSpec
from xmulti.files.call_graph import CallGraph, GraphEdge, GraphNode
from xmulti.stages.greedy_stages import Host
from xmulti.stages.profiled_costs import profiled_model
from xprofiler.roofline import roofline_profile
from xprofiler.samullm_costs import loading_seconds, output_lengths, samullm_costs

HOST = Host(devices=8, linked=2)
ENSEMBLE = (
    "vicuna-13b-v1.5",
    "oasst-sft-4-pythia-12b-epoch-3.5",
    "alpaca-13b",
    "baize-v2-13b",
    "koala-13B-HF",
    "dolly-v2-12b",
    "mpt-7b-chat",
    "chatglm3-6b",
)
"""Eight of the paper's nine models: stablelm-tuned-alpha-7b has no published timings."""
ROUTED = {
    "Llama-2-70b-chat-hf": 408,
    "Mixtral-8x7B-Instruct-v0.1": 1267,
    "WizardLM-13B-V1.2": 2068,
    "CodeLlama-34b-Instruct-hf": 456,
    "Mistral-7B-Instruct-v0.2": 2657,
}
"""Number of requests of each model (paper, Table 1)."""
MEASURED_AS = {"Mixtral-8x7B-Instruct-v0.1": "Mixtral-8x7B-v0.1", "WizardLM-13B-V1.2": "vicuna-13b-v1.5"}
"""Models without published timings, and the model of equal layer sizes whose timings are used."""
SUMMARIZER, EVALUATOR = "vicuna-13b-v1.5", "Llama-2-70b-chat-hf"
CHUNK, INSTRUCTIONS = 2048, 200
"""Numbers of tokens; the evaluator's instructions are an assumption."""
MEDIAN_CHUNKS, LONGEST_OF_100 = 3, 60
_MEMORY_FRACTION = 0.9
"""vLLM's default."""


def data_folder() -> Path:
    """Return the folder of SamuLLM's published files; InputError, with instructions, if they are missing."""
    return public_data("SamuLLM's", "samullm")


def cost_table(folder: Path) -> CostTable:
    """Return the costs of all models of the applications.

    Timed models have their own timings. Models of the same sizes use these timings with their own loading times and
    outputs. Models of other sizes have the costs of the roofline under vLLM's engine.
    """
    timed, load_s, outputs = samullm_costs(folder), loading_seconds(folder), output_lengths(folder)
    models = list(timed.models)
    for name, other in MEASURED_AS.items():
        like = timed.model(other)
        degrees = tuple(replace(d, load_s=load_s.get((name, d.tp))) for d in like.degrees)
        models.append(ModelCosts(name, like.context, degrees, outputs[name]))
    llama_70b = builtin_config("llama-2-70b")
    code_llama = llama_70b | {"num_hidden_layers": 48, "intermediate_size": 22016}
    for name, config, context in (
        ("Llama-2-70b-chat-hf", llama_70b, 4096),
        ("CodeLlama-34b-Instruct-hf", code_llama, 16384),
        ("Mistral-7B-Instruct-v0.2", builtin_config("mistral-7b"), 32768),
    ):
        spec, cluster = ModelSpec.from_config(config, name), parse_cluster("8xA100-80GB", _MEMORY_FRACTION)
        profile = roofline_profile(spec, cluster, engine=VLLM_OF_2024)
        known = {tp: seconds for (model, tp), seconds in load_s.items() if model == name and tp <= HOST.linked}
        models.append(profiled_model(name, spec, cluster, profile, known, outputs[name], context, DATA_SHEET))
    return CostTable(CostTable.VERSION, "samullm and rooflines", timed.machine, tuple(models))


def ensembling(requests: int, cap: int) -> CallGraph:
    """Return the calls in which every model answers every request.

    Prompts have 5 to 127 tokens, 21 on average, as in MixInstruct.
    """
    prompts = _whole(5 + np.random.default_rng(requests).exponential(16.0, requests), 5, 127)
    return CallGraph(tuple(GraphNode(name, name, prompts, longest_output=cap) for name in ENSEMBLE))


def routing() -> CallGraph:
    """Return the calls in which every request goes to one model.

    Prompts have 9 to 577 tokens, 310 on average; outputs have at most 1,585.
    """
    nodes = []
    for seed, (name, count) in enumerate(ROUTED.items()):
        prompts = _whole(9 + 568 * np.random.default_rng(seed).beta(2.12, 1.88, count), 9, 577)
        nodes.append(GraphNode(name, name, prompts, longest_output=1585))
    return CallGraph(tuple(nodes))


def chain_summary(documents: int, cap: int, times: int) -> CallGraph:
    """Return the calls that summarise documents chunk by chunk, and then evaluate the final summaries.

    Each chunk is summarised together with the summary so far.
    """
    nodes = (
        GraphNode("summary", SUMMARIZER, (CHUNK,) * documents, rounds=chunks(documents), longest_output=cap),
        GraphNode("evaluation", EVALUATOR, prompt=INSTRUCTIONS, times=times, longest_output=cap),
    )
    return CallGraph(nodes, (GraphEdge("summary", "summary"), GraphEdge("summary", "evaluation", "final")))


def chunks(documents: int) -> tuple[int, ...]:
    """Return the number of chunks of each document: log-normal quantiles with median 3, the largest of 100 being 60."""
    from scipy.special import ndtri

    deviation = np.log(LONGEST_OF_100 / MEDIAN_CHUNKS) / ndtri(1 - 0.5 / 100)
    at = (np.arange(documents) + 0.5) / documents
    shuffled = np.random.default_rng(documents).permutation(at)
    return _whole(MEDIAN_CHUNKS * np.exp(deviation * ndtri(shuffled)), 1, 10_000)


def _whole(values: Array, least: int, most: int) -> tuple[int, ...]:
    return tuple(int(value) for value in np.clip(np.rint(values), least, most))


def stand_ins() -> Mapping[str, str]:
    """Return, for each model without published timings, a description of the timings used instead."""
    rooflines = {name: "roofline of 8xA100-80GB, vLLM's engine" for name in ROUTED if name not in MEASURED_AS}
    return rooflines | {name: f"timings of {other}" for name, other in MEASURED_AS.items()}
