"""Prefixes: what the prompts of many requests have in common, for prefix caching."""

from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from xcore.arrays import Places
from xcore.specs.workload import RequestLengths


@dataclass(frozen=True, eq=False)
class Prefixes:
    """A tree of texts; each request has one: its prompt and then its output.

    A text begins with tokens of an earlier one, its parent, and continues with tokens of its own.
    """

    parents: Places
    """[texts]: the parent, or -1."""
    shared: Places
    """[texts]: tokens that a text has from its parent."""
    places: Places
    """[requests]: the request's text."""

    @staticmethod
    def of(requests: Sequence[RequestLengths], block_size: int) -> "Prefixes | None":
        """Return the prefixes that prompts share by their identities; None if no request has an identity.

        Prompts known by their tokens are compared in blocks of `block_size`. Turns follow each other as they arrive.
        """
        if all(request.identity is None for request in requests):
            return None
        order = sorted(range(len(requests)), key=lambda i: requests[i].arrival_s)
        texts = _Texts(block_size)
        for i in order:
            texts.add(requests[i])
        places = np.empty(len(order), dtype=np.intp)
        places[order] = np.arange(len(order))
        return texts.prefixes(places)

    @staticmethod
    def of_texts(token_ids: Iterable[Sequence[int]], block_size: int) -> "Prefixes":
        """Return the prefixes that prompts share by their tokens; an output's tokens may follow those of a prompt."""
        texts = _Texts(block_size)
        for ids in token_ids:
            texts.append(*texts.like_tokens(ids))
        return texts.prefixes(np.arange(len(texts.parents), dtype=np.intp))

    @staticmethod
    def of_one_text(tokens: NDArray[np.float64]) -> "Prefixes":
        """Return the prefixes of requests that begin with so many tokens of one text [requests]; none is that text."""
        count = len(tokens)
        parents = np.append(-1, np.where(tokens > 0, 0, -1)).astype(np.intp)
        return Prefixes(parents, np.append(0, tokens).astype(np.intp), np.arange(1, count + 1, dtype=np.intp))

    def take(self, requests: Sequence[int] | Places) -> "Prefixes":
        """Return the prefixes of some of the requests, by their indices."""
        return replace(self, places=self.places[np.asarray(requests, dtype=np.intp)])

    def found(self, input_tokens: NDArray[np.float64], block_size: int) -> NDArray[np.float64]:
        """Return the tokens of each request's prompt that an unlimited cache would have [requests].

        Only full blocks count, and never the last token.
        """
        tokens = np.minimum(self.shared[self.places], input_tokens - 1)
        found: NDArray[np.float64] = block_size * np.maximum(tokens // block_size, 0.0)
        return found

    def repeated(self, count: int) -> "Prefixes":
        """Return the prefixes of `count` requests: these requests, repeated with new texts."""
        rounds = -(-count // len(self.places))
        first = len(self.parents) * np.arange(rounds, dtype=np.intp)[:, None]
        parents = np.where(self.parents < 0, -1, self.parents + first).ravel()
        places = (self.places + first).ravel()[:count]
        return Prefixes(parents, np.tile(self.shared, rounds), places)

    def keys(self, request: int, tokens: int, block_size: int) -> list[int]:
        """Return a key for each full block of the first `tokens` tokens of a request's text, prompt and output.

        A key names the text that the block's tokens are from, and the block's place in it.
        """
        end, text = tokens // block_size, int(self.places[request])
        runs: list[range] = []
        while end > 0:
            parent = int(self.parents[text])
            begin = 0 if parent < 0 else int(self.shared[text]) // block_size
            if begin < end:
                runs.append(range((text << 32) + begin, (text << 32) + end))
                end = begin
            text = parent
        return [key for run in reversed(runs) for key in run]


_RUN = 8
"""Number of blocks that are looked up at once as a run."""


@dataclass
class _Texts:
    """Texts in order of arrival, each compared with earlier ones."""

    block_size: int
    parents: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    _nodes: dict[Hashable, tuple[int, int]] = field(default_factory=dict)
    """By block, or run of blocks, under the previous block's node: the node of its last block, and the first text.

    The first text is the earliest one that has the block.
    """
    _prefixes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By the name of a prefix: the text that has most of it, and the number of its tokens."""
    _turns: dict[Hashable, tuple[int, RequestLengths]] = field(default_factory=dict)
    """By conversation, or chat: its last text, and the request of that text."""

    def prefixes(self, places: Places) -> Prefixes:
        """Return all texts so far."""
        return Prefixes(np.array(self.parents, dtype=np.intp), np.array(self.shared, dtype=np.intp), places)

    def append(self, parent: int, shared: int) -> None:
        """Add a text under the first text that contains the shared prefix."""
        while parent >= 0 and self.parents[parent] >= 0 and self.shared[parent] >= shared:
            parent = self.parents[parent]
        self.parents.append(parent if shared else -1)
        self.shared.append(shared)

    def add(self, request: RequestLengths) -> None:
        """Add a request's text under the text with which it shares most tokens, by all its known identities."""
        identity, alike = request.identity, [(-1, 0)]
        if identity is not None:
            if identity.token_ids:
                alike.append(self.like_tokens(identity.token_ids))
            if identity.block_ids:
                named = [("named", name) for name in identity.block_ids]
                alike.append(self.like_blocks(named, identity.block_tokens, request.input))
            if identity.prefix is not None:
                alike.append(self._like_prefix(identity.prefix, min(identity.prefix_tokens, request.input)))
            if identity.conversation is not None:
                turn = ("conversation", identity.conversation)
                alike.append(self._continued(turn, request))
                self._turns[turn] = len(self.parents), request
            if identity.parent_chat is not None:
                alike.append(self._continued(("chat", identity.parent_chat), request))
            if identity.chat is not None:
                self._turns["chat", identity.chat] = len(self.parents), request
        self.append(*max(alike, key=lambda pair: pair[1]))

    def like_blocks(self, blocks: Iterable[Hashable], size: int, most: int) -> tuple[int, int]:
        """Return the text that shares most of these blocks, from the first on, and their tokens, up to `most`."""
        node, text, alike, own = -1, -1, 0, len(self.parents)
        for number, block in enumerate(blocks):
            place = node, block
            if place in self._nodes:
                node, text = self._nodes[place]
                alike = min((number + 1) * size, most)
            else:
                node = len(self._nodes)
                self._nodes[place] = node, own
        return text, alike

    def like_tokens(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """Return the text that has most of these tokens in full blocks, and the number of these tokens.

        Known runs of blocks are followed at once: most of a long prompt is usually known.
        """
        ids = array("q", token_ids)
        width, text = self.block_size * ids.itemsize, ids.tobytes()
        end, long = len(text) // width * width, _RUN * width
        at, node, like, own = 0, -1, -1, len(self.parents)
        while at + long <= end and (known := self._nodes.get((node, text[at : at + long]))):
            node, like = known
            at += long
        alike, run, new = at, node, False
        while at < end:
            place = node, text[at : at + width]
            at += width
            if place in self._nodes:
                node, like = self._nodes[place]
                alike = at
            else:
                node = len(self._nodes)
                self._nodes[place] = node, own
                new = True
            if at % long == 0:
                self._nodes.setdefault((run, text[at - long : at]), (node, own if new else like))
                run = node
        return like, alike // ids.itemsize

    def _like_prefix(self, name: str, tokens: int) -> tuple[int, int]:
        text, most = self._prefixes.get(name, (-1, 0))
        if tokens > most:
            self._prefixes[name] = len(self.parents), tokens
        return text, min(tokens, most)

    def _continued(self, turn: Hashable, request: RequestLengths) -> tuple[int, int]:
        """Return the text that a turn continues, and the tokens that it shares; (-1, 0) if none.

        A turn whose prompt is shorter than the previous one has dropped its beginning, and continues nothing.
        """
        if turn not in self._turns:
            return -1, 0
        text, before = self._turns[turn]
        return text, min(before.input + before.output, request.input) if request.input >= before.input else 0
