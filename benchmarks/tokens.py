"""Greedy tokens of every policy beside transformers' `generate`, request by request, for every architecture.

Where transformers' two largest logits differ by less than 10⁻⁴ of their standard deviation, either token is right: such
a near-tie is counted apart, and the request's later tokens are not compared. Any other difference is an error.

    python -m benchmarks.tokens
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from exegpt.cluster import local_cluster
from exegpt.model import Architecture
from exegpt.models import Model, load_model
from exegpt.models.create import create_model
from exegpt.models.device import PROCESSOR, find_device
from exegpt.models.families import FAMILIES
from exegpt.request import Request, Result
from exegpt.schedule import ModelReference, ProfileReference, Schedule, Stage
from exegpt.workload import Workload, task
from xrunner.engine import Engine
from xrunner.requests import random_requests

NEAR_TIE = 1e-4
POLICIES: dict[str, dict[str, int]] = {
    "static": {"encode_batch": 7},
    "orca": {"max_num_seqs": 12, "prefills_per_step": 2},
    "chunked": {"max_num_seqs": 12, "max_num_batched_tokens": 48},
    "rra": {"encode_batch": 5, "decode_iterations": 7, "decode_batch": 30},
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
    made = model.generate(
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
    for logits in made.logits:
        first, second = logits[0].topk(2).values
        gaps.append(float((first - second) / logits[0].std()))
    return made.sequences[0, -request.max_tokens :].tolist(), gaps


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


def schedule(model: Model, policy: str, workload: Workload) -> Schedule:
    """A policy's schedule by hand, with room for a dozen requests: admission has to wait for blocks at times."""
    spec = model.spec
    return Schedule(
        version=Schedule.VERSION,
        policy=policy,  # type: ignore[arg-type]
        model=ModelReference(spec, spec.fingerprint),
        cluster=local_cluster(),
        workload=workload,
        profile=ProfileReference("none", ""),
        stages=(Stage((0,), 1, "both", None, (0, spec.layers)),),
        kv_blocks=12 * -(-spec.context // 16),
        dtype=model.dtype,
        kv_dtype=model.dtype,
        **POLICIES[policy],  # type: ignore[arg-type]
    )


SIZES = {"layers": 4, "hidden": 256, "heads": 4, "ffn": 704, "vocab": 8000, "context": 256}


def run(
    number: int,
    seed: int = 0,
    device: torch.device = PROCESSOR,
    archs: Sequence[Architecture] = tuple(FAMILIES),
    sizes: Mapping[str, int] = SIZES,
) -> list[Row]:
    """Compare `number` requests of task T's lengths, scaled to the models' context, under every policy that can run on
    a device.
    """
    workload, _, _ = task("T").scaled_to(sizes["context"])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for arch in archs:
            path = Path(folder) / arch
            grouped = arch in ("llama", "mistral", "qwen2", "qwen3")
            create_model(path, arch, kv_heads=sizes["heads"] // 2 if grouped else None, seed=seed, **sizes)
            if arch == "mistral":
                config = json.loads((path / "config.json").read_text())
                (path / "config.json").write_text(json.dumps(config | {"sliding_window": 48}))
            requests = random_requests(workload.draw(number, seed, sizes["context"]), sizes["vocab"], seed)
            model, theirs = load_model(path, device=device), load(path, arch)
            wanted = {r.id: reference(theirs, r) for r in requests}
            for policy in POLICIES:
                if model.spec.encoder_layers and policy == "chunked":
                    continue  # an encoder reads its prompts whole
                results = Engine(model, schedule(model, policy, workload)).run(requests).results
                rows.append(compare(arch, policy, results, wanted))
    return rows


def main() -> int:
    """Print the table; 1 where any token differs without a near-tie, or near-ties exceed 1 in 10⁴ tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="cpu or cuda (default: a GPU where there is one)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = run(args.requests, args.seed, find_device(args.device))
    tokens, ties = sum(row.tokens for row in rows), sum(row.near_ties for row in rows)
    differences = sum(row.differences for row in rows)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        for row in rows:
            print(
                f"{row.arch:7} {row.policy:8} {row.requests} requests, {row.tokens} tokens: "
                f"{row.near_ties} near-ties, {row.differences} differences"
            )
        print(f"{tokens} tokens, {ties} near-ties, {differences} differences")
    return int(differences > 0 or ties > tokens / 1e4)


if __name__ == "__main__":
    sys.exit(main())
