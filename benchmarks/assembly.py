"""Host time of assembling a decoding iteration: what Python does each time before the device gets anything.

python -m benchmarks.assembly
"""

import argparse
import statistics
import time
from dataclasses import replace

import numpy as np
import torch

from xcore.batching import MicroBatch, Sequence
from xcore.console import output
from xcore.requests.request import Request
from xcore.specs.schedule import BLOCK_SIZE
from xrunner.rank.assembly import Assembler
from xrunner.rank.running import RunningRequest
from xrunner.rank.sampling_state import SamplingState

REQUEST = Request("", (), 0)
WAYS = {
    "greedy": REQUEST,
    "temperature, top-p": replace(REQUEST, temperature=0.8, top_p=0.9),
    "temperature, repetition penalty": replace(REQUEST, temperature=0.8, repetition_penalty=1.2),
}
"""Names of ways to choose tokens → a request that is filled in."""
_STEPS = 200
_VOCAB = 128_256


def decoding(batch: int, context: int, way: Request) -> dict[int, RunningRequest]:
    """Sequences in the midst of their outputs, with `context` tokens each, of which half are their prompts'."""
    rng, blocks = np.random.default_rng(0), -(-(context + _STEPS) // BLOCK_SIZE)
    running = {}
    for index in range(batch):
        prompt, produced = rng.integers(_VOCAB, size=(2, context // 2))
        request = replace(way, id=str(index), prompt_ids=tuple(prompt.tolist()), max_tokens=context + _STEPS)
        sequence = Sequence(index, len(prompt), request.max_tokens)
        sequence.blocks = list(range(index * blocks, (index + 1) * blocks))
        sequence.cached, sequence.generated = context - 1, len(produced)
        table = np.array(sequence.blocks, dtype=np.int32)
        running[index] = RunningRequest(request, sequence, prompt, produced.tolist(), table)
        if request.repetition_penalty != 1:
            running[index].slot = index
    return running


def step_seconds(batch: int, context: int, way: Request) -> tuple[float, float]:
    """Median seconds of assembling an iteration, and of entering its tokens into the sampling state on the CPU; not of
    the first, with which prompts are entered."""
    running, state = decoding(batch, context, way), SamplingState(_VOCAB, torch.device("cpu"))
    sequences = tuple(request.sequence for request in running.values())
    assemble, times = Assembler(running, BLOCK_SIZE), []
    for _ in range(_STEPS):
        began = time.perf_counter()
        device_batch, receivers = assemble(MicroBatch(0, (), sequences))
        assembled = time.perf_counter()
        if device_batch.sampling:
            tensors = [torch.from_numpy(array) for array in device_batch.sampling]
            state.sampling(device_batch.sampling, device_batch.edits, tensors)
        times.append((assembled - began, time.perf_counter() - assembled))
        for receiver in receivers:
            receiver.output.append(7)
            receiver.sequence.cached += 1
    assembling, entering = zip(*times[1:], strict=True)
    return statistics.median(assembling), statistics.median(entering)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    args = parser.parse_args()
    rows = []
    for name, way in WAYS.items():
        assembling, entering = step_seconds(args.batch, args.context, way)
        rows.append([name, output.seconds(assembling), output.seconds(entering)])
    title = f"{args.batch} sequences of {args.context} tokens, a vocabulary of {_VOCAB:,}"
    output.table(["tokens chosen", "assembling", "sampling state"], rows, title)


if __name__ == "__main__":
    main()
