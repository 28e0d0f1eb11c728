"""Run peers on the same weights and requests: transformers' `generate` in static batches, and its continuous batching.

Results are useful output tokens per second. Each request counts the tokens that it requested, but not the further
tokens that its batch generated.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from xcore.requests.request import Request
from xcore.specs.request_times import RequestTimes
from xrunner.models.device import CPU
from xrunner.models.weights import torch_dtype


@dataclass(frozen=True)
class PeerRun:
    """A peer's run of the requests."""

    seconds: float
    outputs: tuple[list[int], ...]
    """Each request's output tokens, in the requests' order."""
    served: tuple[RequestTimes, ...]

    @property
    def tokens_s(self) -> float:
        """Useful output tokens per second."""
        return sum(map(len, self.outputs)) / self.seconds


def load(directory: Path, dtype: str = "fp32", device: torch.device = CPU) -> Any:
    """Load a model with transformers."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch_dtype(dtype), attn_implementation="sdpa")
    return model.eval().to(device)


@torch.inference_mode()
def generate_static(model: Any, requests: Sequence[Request], batch: int) -> PeerRun:
    """Run `model.generate` over batches of `batch` requests in the given order.

    Prompts are padded on the left, and each batch runs to its longest output. Tokens are available when the batch is
    done.
    """
    outputs: list[list[int]] = []
    served: list[RequestTimes] = []
    start = time.perf_counter()
    for first in range(0, len(requests), batch):
        group = requests[first : first + batch]
        began = time.perf_counter() - start
        width = max(len(r.prompt_ids) for r in group)
        ids = torch.tensor([[0] * (width - len(r.prompt_ids)) + list(r.prompt_ids) for r in group])
        mask = torch.tensor([[0] * (width - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in group])
        generated = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max(r.max_tokens for r in group),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs += [row[width : width + r.max_tokens] for row, r in zip(generated.tolist(), group, strict=True)]
        done = time.perf_counter() - start
        served += [
            RequestTimes(first + i, len(r.prompt_ids), r.max_tokens, 0.0, began, done, done)
            for i, r in enumerate(group)
        ]
    return PeerRun(time.perf_counter() - start, tuple(outputs), tuple(served))


@torch.no_grad()
def continuous(model: Any, requests: Sequence[Request], most: int, page_size: int = 32) -> PeerRun:
    """Run transformers' continuous batching with at most `most` requests at a time."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    longest = max(len(r.prompt_ids) + r.max_tokens for r in requests)
    prompt = max(len(r.prompt_ids) for r in requests)
    config = ContinuousBatchingConfig(
        page_size,  # positional: its name is block_size at least until transformers 5.17
        num_blocks=most * (-(-longest // page_size) + 1),
        max_batch_tokens=max(2 * prompt, most),
        max_requests_per_batch=most,
        allow_block_sharing=False,
    )
    generation = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
    results: dict[int, Any] = {}
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config
    ) as manager:
        start = time.perf_counter()
        for number, request in enumerate(requests):
            manager.add_request(
                list(request.prompt_ids),
                request_id=str(number),
                max_new_tokens=request.max_tokens,
                record_timestamps=True,
                eos_token_id=-1,
            )
        while len(results) < len(requests):
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("transformers' continuous batching stopped before all requests were done")
                continue
            if result.error is not None:
                raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
            if result.is_finished():
                results[int(result.request_id)] = result
        seconds = time.perf_counter() - start
    in_order = [results[number] for number in range(len(requests))]
    served = tuple(_served(number, result, start) for number, result in enumerate(in_order))
    return PeerRun(seconds, tuple(list(result.generated_tokens) for result in in_order), served)


def _served(number: int, result: Any, start: float) -> RequestTimes:
    """Return when continuous batching began a request, produced its first token and finished it."""
    lengths = len(result.prompt_ids), len(result.generated_tokens)
    moments = result.lifespan[0], result.timestamps[0], result.lifespan[1]
    return RequestTimes(number, *lengths, 0.0, *(moment - start for moment in moments))


WAYS: dict[str, Callable[[Any, Sequence[Request]], PeerRun]] = {
    "generate, batches of 16": lambda model, requests: generate_static(model, requests, 16),
    "continuous batching, at most 16": lambda model, requests: continuous(model, requests, 16),
    "continuous batching, at most 64": lambda model, requests: continuous(model, requests, 64),
}
"""The ways to serve that `bench` runs."""
