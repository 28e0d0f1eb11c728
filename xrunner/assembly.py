"""Assembly: from a policy's step to the tensors of one iteration, without padding."""

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
import torch

from exegpt.models import AttentionBatch, Batch
from exegpt.policies import Sequence, Step
from exegpt.request import Request

Array = np.ndarray


@dataclass(eq=False)
class Running:
    """What the runner keeps of a request beside the ledger's bookkeeping."""

    request: Request
    sequence: Sequence
    prompt: Array
    """int64 [input tokens]"""
    output: list[int] = field(default_factory=list)
    table: Array | None = None
    """int32 [blocks], from its admission on"""
    start_s: float | None = None
    first_token_s: float | None = None
    stopped: bool = False
    """Whether its last token ends the text."""

    def token(self, position: int) -> int:
        """The token at a position of prompt and output."""
        beyond = position - len(self.prompt)
        return self.output[beyond] if beyond >= 0 else int(self.prompt[position])


def assemble(step: Step, running: Rows[Running], block_size: int) -> tuple[Batch, list[Running]]:
    """The batch of a step, and the requests that its rows give a token, in order.

    `running` is indexed by `Sequence.index`. A finished sequence of a static batch computes its last cached token
    again, in place: its row costs what it costs, and changes nothing.
    """
    tokens: list[Array] = []
    positions: list[Array] = []
    attention: list[AttentionBatch] = []
    tables: list[Array] = []
    owners: list[int] = []
    """Place in `tables` of every token's sequence, as (place, tokens)."""
    rows: list[int] = []
    receivers: list[Running] = []
    contexts: list[int] = []
    offsets = [0]
    for sequence, count in step.encode:
        one = running[sequence.index]
        if one.table is None:
            one.table = np.asarray(sequence.blocks, dtype=np.int32)
        begin, end = sequence.cached, sequence.cached + count
        tokens.append(one.prompt[begin:end])
        positions.append(np.arange(begin, end))
        tables.append(one.table)
        owners.append(count)
        contexts.append(end)
        offsets.append(offsets[-1] + count)
        if end == sequence.input_tokens:
            rows.append(offsets[-1] - 1)
            receivers.append(one)
    encoded = offsets[-1]
    if step.encode:
        attention.append(_attention(0, encoded, tables, offsets, contexts))
    if step.decode:
        decoding = [running[sequence.index] for sequence in step.decode]
        places = [one.sequence.cached - one.sequence.finished for one in decoding]
        tokens.append(np.array([one.token(place) for one, place in zip(decoding, places, strict=True)], np.int64))
        positions.append(np.array(places))
        own = [one.table for one in decoding if one.table is not None]
        attention.append(
            _attention(encoded, encoded + len(own), own, range(len(own) + 1), [place + 1 for place in places])
        )
        tables += own
        owners += [1] * len(own)
        rows += range(encoded, encoded + len(own))
        receivers += decoding
    position = np.concatenate(positions)
    return (
        Batch(
            tokens=torch.from_numpy(np.concatenate(tokens)),
            positions=torch.from_numpy(position),
            slots=torch.from_numpy(_slots(position, tables, owners, block_size)),
            attention=tuple(attention),
            rows=None if len(rows) == len(position) else torch.tensor(rows, dtype=torch.int64),
        ),
        receivers,
    )


def _attention(
    begin: int, end: int, tables: Rows[Array], offsets: Iterable[int], contexts: Rows[int]
) -> AttentionBatch:
    wide = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, table in zip(wide, tables, strict=True):
        row[: len(table)] = table
    return AttentionBatch(
        begin,
        end,
        torch.from_numpy(wide),
        torch.tensor(list(offsets), dtype=torch.int32),
        torch.tensor(contexts, dtype=torch.int32),
    )


def _slots(positions: Array, tables: Rows[Array], counts: Rows[int], block_size: int) -> Array:
    """Every token's place in the cache: its sequence's block, then the offset in it. int64 [tokens]."""
    starts = np.cumsum([0, *(len(table) for table in tables)])[:-1]
    blocks = np.concatenate(tables)[np.repeat(starts, counts) + positions // block_size]
    return blocks.astype(np.int64) * block_size + positions % block_size
