"""The peers on the same weights and requests: transformers' `generate` in static batches, and its continuous batching.

Useful output tokens per second: each request counts the tokens it asked for, not those that a batch made beside them.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from exegpt.request import Request


def load(directory: Path) -> Any:
    """The model as transformers loads it, in float32."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()


@torch.inference_mode()
def generate_static(model: Any, requests: Sequence[Request], batch: int) -> tuple[float, list[list[int]]]:
    """Seconds and outputs of `model.generate` over batches of `batch` requests in the given order, prompts padded on
    the left, each batch run to its longest output.
    """
    outputs: list[list[int]] = []
    start = time.perf_counter()
    for first in range(0, len(requests), batch):
        group = requests[first : first + batch]
        width = max(len(r.prompt_ids) for r in group)
        ids = torch.tensor([[0] * (width - len(r.prompt_ids)) + list(r.prompt_ids) for r in group])
        mask = torch.tensor([[0] * (width - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in group])
        longest = max(r.max_tokens for r in group)
        made = model.generate(
            ids, attention_mask=mask, max_new_tokens=longest, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        outputs += [row[width : width + r.max_tokens].tolist() for row, r in zip(made, group, strict=True)]
    return time.perf_counter() - start, outputs


@torch.no_grad()
def continuous(
    model: Any, requests: Sequence[Request], most: int, page_size: int = 32
) -> tuple[float, list[list[int]]]:
    """Seconds and outputs of transformers' continuous batching with at most `most` requests at a time."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    longest = max(len(r.prompt_ids) + r.max_tokens for r in requests)
    prompt = max(len(r.prompt_ids) for r in requests)
    config = ContinuousBatchingConfig(
        page_size=page_size,
        num_blocks=most * (-(-longest // page_size) + 1),
        max_batch_tokens=max(2 * prompt, most),
        max_requests_per_batch=most,
        allow_block_sharing=False,
    )
    generation = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs: dict[str, list[int]] = {}
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config
    ) as manager:
        start = time.perf_counter()
        for number, request in enumerate(requests):
            manager.add_request(
                list(request.prompt_ids), request_id=str(number), max_new_tokens=request.max_tokens, eos_token_id=-1
            )
        while len(outputs) < len(requests):
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("transformers' continuous batching stopped before all requests were done")
                continue
            if result.error is not None:
                raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
            if result.is_finished():
                outputs[result.request_id] = list(result.generated_tokens)
        seconds = time.perf_counter() - start
    return seconds, [outputs[str(number)] for number in range(len(requests))]


WAYS: dict[str, Callable[[Any, Sequence[Request]], tuple[float, list[list[int]]]]] = {
    "generate, batches of 16": lambda model, requests: generate_static(model, requests, 16),
    "continuous batching, at most 16": lambda model, requests: continuous(model, requests, 16),
    "continuous batching, at most 64": lambda model, requests: continuous(model, requests, 64),
}
"""What `bench` runs."""
