"""Greedy tokens of every policy beside transformers' `generate`, request by request, for every architecture.

Where transformers' two largest logits differ by less than 10⁻⁴ of their standard deviation, either token is right: such
a near-tie is counted apart, and the request's later tokens are not compared. Any other difference is an error.

    python -m benchmarks.tokens
    python -m benchmarks.tokens --two-ranks     # under mpirun, on two GPUs, or two processes sharing one
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.job import run_all
from benchmarks.model_sizes import ModelSizes
from xcore.policies import TRAITS
from xcore.requests.request import Request, Result
from xcore.requests.requests import random_requests
from xcore.specs.cluster import local_cluster
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import ModelReference, ProfileReference, Schedule, Stage
from xcore.specs.workload import Workload, task
from xrunner.core.engine import Engine
from xrunner.models import load_model
from xrunner.models.device import CPU, find_device
from xrunner.models.families import FAMILIES

NEAR_TIE = 1e-4
NEAR_TIE_HALF = 0.02
"""The same in float16. Its roundings move the difference of the two largest logits by up to 0.006 of the standard
deviation, and so two ways apart by up to 0.012 (docs/log/tokens.md).
"""
POLICIES: dict[str, dict[str, int]] = {
    "static": {"encode_batch": 7},
    "orca": {"max_num_seqs": 12, "prefills_per_step": 2},
    "chunked": {"max_num_seqs": 12, "max_num_batched_tokens": 48},
    "rra": {"encode_batch": 5, "decode_iterations": 7, "decode_batch": 30},
    "waa-c": {"encode_batch": 5, "decode_batch": 30, "micro_batches": 2},
}


@dataclass(frozen=True)
class Row:
    """One architecture under one policy."""

    arch: str
    policy: str
    requests: int
    tokens: int
    """Output tokens compared: up to a near-tie, all."""
    near_ties: int
    differences: int
    """Requests that differ where no near-tie explains it."""


@torch.inference_mode()
def reference(model: Any, request: Request) -> tuple[list[int], list[float]]:
    """transformers' greedy tokens for one request, and for each the gap of its two largest logits over their standard
    deviation.
    """
    generated = model.generate(
        torch.tensor([request.prompt_ids]),
        attention_mask=torch.ones(1, len(request.prompt_ids), dtype=torch.long),
        max_new_tokens=request.max_tokens,
        min_new_tokens=request.max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    gaps = []
    for logits in generated.logits:
        first, second = logits[0].topk(2).values
        gaps.append(float((first - second) / logits[0].std()))
    return generated.sequences[0, -request.max_tokens :].tolist(), gaps


def load(path: Path, arch: str) -> Any:
    """transformers' model of a directory."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind = AutoModelForSeq2SeqLM if arch == "t5" else AutoModelForCausalLM
    model = kind.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def compare(arch: str, policy: str, results: Sequence[Result], wanted: dict[str, tuple[list[int], list[float]]]) -> Row:
    """Count what a policy's results have in common with the reference."""
    tokens = near_ties = differences = 0
    for result in results:
        expected, gaps = wanted[result.id]
        pairs = zip(result.output_ids, expected, strict=True)
        first = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        tokens += len(expected) if first is None else first
        if first is not None:
            near_ties += gaps[first] < NEAR_TIE
            differences += gaps[first] >= NEAR_TIE
    return Row(arch, policy, len(results), tokens, near_ties, differences)


def compare_both(
    arch: str, policy: str, theirs: Any, requests: Sequence[Request], both: Sequence[Sequence[Result]]
) -> Row:
    """Count what the results of two ways have in common. Where they part, transformers' model `theirs` shows how far
    apart the two tokens' logits are.
    """
    prompts = {request.id: list(request.prompt_ids) for request in requests}
    ours, others = ({result.id: list(result.output_ids) for result in results} for results in both)
    tokens = near_ties = differences = 0
    for name, mine in ours.items():
        pairs = list(zip(mine, others[name], strict=True))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        tokens += len(pairs) if first is None else first
        if first is not None:
            near = gap(theirs, [*prompts[name], *mine[:first]], *pairs[first]) < NEAR_TIE_HALF
            near_ties += near
            differences += not near
    return Row(arch, policy, len(ours), tokens, near_ties, differences)


@torch.inference_mode()
def gap(model: Any, prefix: Sequence[int], token: int, other: int) -> float:
    """How far apart the logits of two tokens are after a prefix, over all logits' standard deviation."""
    logits = model(torch.tensor([prefix])).logits[0, -1]
    return float((logits[token] - logits[other]).abs() / logits.std())


def schedule(
    spec: ModelSpec, policy: str, workload: Workload, stages: Sequence[Stage] = (), dtype: str = "fp32"
) -> Schedule:
    """A policy's schedule by hand, on one device or on the stages' ones, with room for a dozen requests: admission has
    to wait for blocks at times.
    """
    return Schedule(
        version=Schedule.VERSION,
        policy=policy,
        control=TRAITS[policy].control(**POLICIES[policy]),
        model=ModelReference(spec, spec.fingerprint),
        cluster=local_cluster(),
        workload=workload,
        profile=ProfileReference("none", ""),
        stages=tuple(stages) or (Stage((0,), 1, "both", None, (0, spec.layers)),),
        kv_blocks=12 * -(-spec.context // 16),
        dtype=dtype,
        kv_dtype=dtype,
    )


def on_two_devices(layers: int) -> dict[str, tuple[str, tuple[Stage, ...]]]:
    """Ways to share a decoder's layers: name → policy and stages."""
    half, every = layers // 2, (0, layers)
    pipeline = Stage((0,), 1, "both", None, (0, half)), Stage((1,), 1, "both", None, (half, layers))
    return {
        "rra, two stages": ("rra", pipeline),
        "orca, TP 2": ("orca", (Stage((0, 1), 2, "both", None, every),)),
        "waa": ("waa-c", (Stage((0,), 1, "encode", None, every), Stage((1,), 1, "decode", None, every))),
    }


SIZES = ModelSizes(layers=4, hidden=256, heads=4, ffn=704, vocab=8000, context=256)


@dataclass(frozen=True)
class _Model:
    """One architecture's model in a directory, with requests and what transformers makes of them."""

    arch: str
    path: Path
    requests: list[Request]
    wanted: dict[str, tuple[list[int], list[float]]]


def _models(
    folder: Path, archs: Sequence[str], number: int, seed: int, workload: Workload, sizes: ModelSizes
) -> Iterator[_Model]:
    """A model of each architecture, with requests of the workload's lengths."""
    for arch in archs:
        path = folder / arch
        grouped = arch in ("llama", "mistral", "qwen2", "qwen3")
        replace(sizes, kv_heads=sizes.heads // 2 if grouped else None).create(path, seed, arch)
        if arch == "mistral":
            config = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps(config | {"sliding_window": 48}))
        requests = random_requests(workload.draw(number, seed, sizes.context), sizes.vocab, seed)
        theirs = load(path, arch)
        yield _Model(arch, path, requests, {r.id: reference(theirs, r) for r in requests})


def run(
    number: int,
    seed: int = 0,
    device: torch.device = CPU,
    archs: Sequence[str] = tuple(FAMILIES),
    sizes: ModelSizes = SIZES,
) -> list[Row]:
    """Compare `number` requests of task T's lengths, scaled to the models' context, under every policy that can run on
    a device.
    """
    workload, _, _ = task("T").scaled_to(sizes.context)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for cell in _models(Path(folder), archs, number, seed, workload, sizes):
            model = load_model(cell.path, device=device)
            for policy in POLICIES:
                if policy == "waa-c" or (model.spec.encoder_layers and policy == "chunked"):
                    continue  # WAA's sides are devices of their own; an encoder reads its prompts whole
                results = Engine(model, schedule(model.spec, policy, workload)).run(cell.requests).results
                rows.append(compare(cell.arch, policy, results, cell.wanted))
    return rows


def run_flashinfer(
    number: int,
    seed: int = 0,
    device: torch.device = CPU,
    archs: Sequence[str] = ("llama", "mistral", "gpt2"),
    sizes: ModelSizes = SIZES,
) -> list[Row]:
    """The same requests by FlashInfer and by Triton, in float16."""
    workload, _, _ = task("T").scaled_to(sizes.context)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for cell in _models(Path(folder), archs, number, seed, workload, sizes):
            theirs = load(cell.path, cell.arch).half().float()
            models = [load_model(cell.path, "fp16", device=device, attention=way) for way in ("flashinfer", "triton")]
            for policy in POLICIES:
                if policy == "waa-c":  # whose sides are devices of their own
                    continue
                plan = schedule(models[0].spec, policy, workload, dtype="fp16")
                both = [Engine(model, plan).run(cell.requests).results for model in models]
                rows.append(compare_both(cell.arch, f"{policy}, FlashInfer", theirs, cell.requests, both))
    return rows


def run_two_ranks(
    number: int,
    seed: int = 0,
    device: torch.device = CPU,
    archs: Sequence[str] = ("llama", "gpt2"),
    sizes: ModelSizes = SIZES,
) -> list[Row]:
    """The same on two ranks: a pipeline, a tensor-parallel group, and encoding and decoding disaggregated. Where there
    is one GPU, they share it.
    """
    workload, _, _ = task("T").scaled_to(sizes.context)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for cell in _models(Path(folder), archs, number, seed, workload, sizes):
            spec = ModelSpec.from_directory(cell.path)
            ways = on_two_devices(spec.layers)
            plans = [schedule(spec, policy, workload, stages) for policy, stages in ways.values()]
            done = run_all(cell.path, plans, cell.requests, 2, 1, Path(folder), device.type)
            runs = zip(ways, done.runs, strict=True)
            rows += [compare(cell.arch, way, run.results, cell.wanted) for way, run in runs]
    return rows


def main() -> int:
    """Print the table; 1 where any token differs without a near-tie, or near-ties exceed 1 in 10⁴ tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="cpu or cuda (default: a GPU where there is one)")
    parser.add_argument("--two-ranks", action="store_true", help="under mpirun, policies of two devices")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = (run_two_ranks if args.two_ranks else run)(args.requests, args.seed, find_device(args.device))
    tokens, ties = sum(row.tokens for row in rows), sum(row.near_ties for row in rows)
    differences = sum(row.differences for row in rows)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        for row in rows:
            print(
                f"{row.arch:7} {row.policy:15} {row.requests} requests, {row.tokens} tokens: "
                f"{row.near_ties} near-ties, {row.differences} differences"
            )
        print(f"{tokens} tokens, {ties} near-ties, {differences} differences")
    return int(differences > 0 or ties > tokens / 1e4)


if __name__ == "__main__":
    sys.exit(main())
