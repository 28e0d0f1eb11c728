"""One phase at a time: the policy of a model on shared devices, whenever it has its turn (`sharing.py`)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from xcore.batching import ENDLESS, Ledger, Sequence, Step
from xcore.batching.step import StagePhase
from xcore.errors import InputError
from xcore.policies import orca
from xcore.specs.schedule import Schedule


@dataclass(frozen=True)
class OnePhasePolicy:
    """Runs whole prompts, as many as fit, or one more token for all residents; preempted sequences are prefilled again.

    No schedule names this policy: it is the policy of all models that share devices.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    """Tokens of prompts that are prefilled together; a longer prompt runs alone."""
    prefill_share: float = 1.0
    """Share of the multiprocessors while it prefills."""
    decode_share: float = 1.0
    """Share of the multiprocessors while it decodes."""

    @staticmethod
    def of(schedule: Schedule, decode_share: float = 1.0) -> "OnePhasePolicy":
        """Build the policy with the limits of a schedule of policy orca."""
        control = schedule.control
        if not isinstance(control, orca.OrcaControl):
            raise InputError(
                f"A model that shares devices can't use policy {schedule.policy}: its schedule needs the limits of "
                f"policy {orca.TRAITS.name}; run `exegpt tune` again."
            )
        tokens = control.prefills_per_step * max(1, round(schedule.workload.input.mean))
        return OnePhasePolicy(control.max_num_seqs, tokens, decode_share=decode_share)

    @property
    def most_running(self) -> int:
        """The maximum number of running sequences."""
        return self.max_num_seqs

    def together(self, prompts: Iterable[int]) -> list[list[int]]:
        """Divide prompts, in order, into the batches of one prefill each; prompts are given by their tokens."""
        jobs: list[list[int]] = []
        for tokens in prompts:
            if jobs and sum(jobs[-1]) + tokens <= self.max_num_batched_tokens:
                jobs[-1].append(tokens)
            else:
                jobs.append([tokens])
        return jobs

    def first(self, ledger: Ledger, now: float) -> Sequence | None:
        """Return the waiting prompt that is admitted next; None if there is none, or the residents are too many."""
        if ledger.residents >= self.max_num_seqs:
            return None
        first = ledger.waiting.peek(now)
        return None if first is None or first.last_token_s > now else first

    def can_prefill(self, ledger: Ledger, now: float, taken: Callable[[], int] = lambda: 0) -> bool:
        """Return whether the blocks of `first`'s prompt are free if `taken()` further blocks are in use."""
        first = self.first(ledger, now)
        return first is not None and ledger.admission.blocks(first) <= ledger.pool.available - taken()

    def next_step(self, ledger: Ledger, now: float, phase: StagePhase = "both") -> Step | None:
        """Return the next step of a phase; of both, prompts first. None if there is nothing to do."""
        if phase == "encode" or (phase == "both" and self.can_prefill(ledger, now)):
            return self._prefill(ledger, now)
        decode, _ = ledger.grow_decoding(now)
        return Step(decode=decode, repeats=ENDLESS) if decode else None

    def _prefill(self, ledger: Ledger, now: float) -> Step | None:
        room = self.max_num_batched_tokens

        def fits(sequence: Sequence) -> bool:
            nonlocal room
            whole = room == self.max_num_batched_tokens or sequence.to_prefill <= room
            room -= sequence.to_prefill
            return whole

        admitted = ledger.admit(self.max_num_seqs - ledger.residents, now, fits=fits)
        return Step(tuple((sequence, sequence.to_prefill) for sequence in admitted)) if admitted else None
