"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads in one latent vector."""

from dataclasses import dataclass

from xcore.errors import InputError
from xcore.spec import Spec

_INDEX_BYTES = 132
"""Bytes of one token's index key: 128 values of 8 bits and a scale of 32."""


@dataclass(frozen=True)
class IndexAttention(Spec):
    """Sparse attention: a small attention scores all earlier tokens, and the heads see the best `top_k` of them."""

    top_k: int
    heads: int
    head_size: int

    def parameters(self, hidden: int, q_rank: int) -> int:
        """Return its parameters in one layer: queries, keys with their norm, and the heads' weights."""
        return self.heads * self.head_size * q_rank + self.head_size * (hidden + 2) + self.heads * hidden


@dataclass(frozen=True)
class LatentAttention(Spec):
    """The ranks and head sizes of latent attention; the cache keeps `kv_rank + rope` values for each token."""

    kv_rank: int
    nope: int
    """Values of a query or key without position."""
    rope: int
    """Values of a query or key with a rotary position; all heads share the key's."""
    value: int
    """Values of a head's value."""
    q_rank: int | None = None
    """Rank of the queries' projection; None: they have a full matrix."""
    index: IndexAttention | None = None

    def __post_init__(self) -> None:
        sizes = (self.kv_rank, self.nope, self.rope, self.value, self.q_rank or 1)
        if min(sizes) < 1:
            raise InputError(f"Latent attention has a size below 1: {self}.")

    @property
    def cached(self) -> int:
        """Return the values that one layer caches for a token."""
        return self.kv_rank + self.rope

    def matrices(self, hidden: int, heads: int) -> tuple[tuple[int, int], ...]:
        """Return (outputs, inputs) of the products of one token, for the `heads` heads of one device.

        They are down, queries up, keys and values up (or what takes their place in decoding), and output.
        """
        query = heads * (self.nope + self.rope)
        down = (self.q_rank or 0) + self.cached
        queries = (query, self.q_rank) if self.q_rank else (query, hidden)
        return (down, hidden), queries, (heads * (self.nope + self.value), self.kv_rank), (hidden, heads * self.value)

    @property
    def prompt_pair(self) -> int:
        """Return the multiply-adds of one head for a token and a position that it sees, over expanded keys."""
        return self.nope + self.rope + self.value

    @property
    def decode_pair(self) -> int:
        """Return the multiply-adds of one head for a token and a position that it sees, over latent vectors."""
        return 2 * self.kv_rank + self.rope

    @property
    def expansion(self) -> int:
        """Return the multiply-adds of one head to compute a cached token's keys and values."""
        return self.kv_rank * (self.nope + self.value)

    @property
    def index_bytes(self) -> int:
        """Return the bytes of one token's index key in one layer; 0 without an index."""
        return _INDEX_BYTES if self.index else 0
