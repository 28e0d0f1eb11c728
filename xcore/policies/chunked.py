"""Chunked prefill (Sarathi; vLLM v1): a token budget per iteration, decoding first, the rest for chunks of prompts."""

from collections.abc import Mapping
from dataclasses import dataclass

from xcore.batching import ENDLESS, Ledger, Step
from xcore.batching.sequence import PREEMPTED
from xcore.batching.step import StagePhase
from xcore.errors import InputError
from xcore.policies.control import Control, Policy, PolicyContext, Residents, Tokens
from xcore.policies.traits import Traits
from xcore.specs.engine_spec import OWN_ENGINE


class ChunkedPolicy:
    """Limits the residents to `max_num_seqs` and the tokens computed in one iteration to `max_num_batched_tokens`."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int):
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens

    def next_step(self, ledger: Ledger, now: float, phase: StagePhase = "both") -> Step | None:
        """Return the next iteration; None while nothing can run."""
        ledger.giving_way.make_way(now, self.max_num_seqs)
        rows = 1 + ledger.drafted  # tokens that an iteration computes of a decoding sequence
        decode, preempted = ledger.grow_decoding(now, self.max_num_batched_tokens // rows)
        budget, chunks = self.max_num_batched_tokens - rows * len(decode), []
        for sequence in ledger.encoding:
            if budget <= 0:
                break
            chunks.append((sequence, min(budget, sequence.to_prefill)))
            budget -= chunks[-1][1]
        encode, more = ledger.grow(chunks, now)
        while budget > 0 and ledger.residents < self.max_num_seqs and not preempted + more:
            admitted = ledger.admit(1, now, budget)
            if not admitted:
                break
            encode.append((admitted[0], min(budget, admitted[0].to_prefill)))
            budget -= encode[-1][1]
        if more:  # under a preemption also sequences that decode
            decode = tuple([sequence for sequence in decode if sequence.status is not PREEMPTED])
        if encode:
            return Step(tuple(encode), decode)
        room = ledger.giving_way.ranks_running or (budget > 0 and ledger.residents < self.max_num_seqs)
        return Step(decode=decode, repeats=ENDLESS, arrivals=room) if decode else None


@dataclass(frozen=True, kw_only=True)
class ChunkedControl(Control):
    """Variables of chunked prefill."""

    max_num_seqs: Residents
    max_num_batched_tokens: Tokens

    def make(self, context: PolicyContext) -> Policy:
        """Return the policy with these variables."""
        return ChunkedPolicy(self.max_num_seqs, self.max_num_batched_tokens)

    @classmethod
    def check(cls, variables: Mapping[str, int], rows: int = 1) -> None:
        """Raise InputError for a token budget below the tokens of all decoding sequences, which vLLM refuses."""
        budget, residents = variables.get("max_num_batched_tokens"), variables.get("max_num_seqs")
        if budget is not None and residents is not None and budget < rows * residents:
            each = "one token" if rows == 1 else f"{rows} tokens"
            raise InputError(
                f"A budget of {budget:,} tokens per iteration is too small for {residents:,} sequences with {each} "
                "each: raise --max-num-batched-tokens or lower --max-num-seqs."
            )


TRAITS = Traits(
    name="chunked",
    what="prompts in chunks within a token budget (Sarathi, vLLM v1)",
    control=ChunkedControl,
    # SGLang with --enable-mixed-chunk and TensorRT-LLM with enable_chunked_prefill; vLLM by default.
    engines=("vllm", "vllm-0.11", "sglang", "tensorrt-llm", OWN_ENGINE),
    compiled=2,
    mixed=True,
    splits_prompts=True,
    grows=True,
    caches_prefixes=True,
    gives_way=True,
    complexity=0,
    mark="c",
    colour="#7a5aa8",
)
