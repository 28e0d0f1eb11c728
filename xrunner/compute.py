"""Compute: what a rank does with a piece on its device. On a GPU all is queued, and tokens are waited for alone."""

from collections.abc import Callable

import torch

from exegpt.kernels.sampling import Sampling
from exegpt.models import KVCache, Model
from xrunner.assembly import Work
from xrunner.decode_graphs import DecodeGraphs
from xrunner.gpu import Gpu, Moment
from xrunner.packing import send


class Compute:
    """One rank's layers, and its choice of tokens where it samples.

    `gpu` is None on the processor. `graphs` tells whether what the layers do can be repeated without Python, and
    `takes_states` whether another stage is before this one. `wait` is called with the moment at which a piece is done.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        samples: bool,
        gpu: Gpu | None = None,
        graphs: bool = False,
        takes_states: bool = False,
        wait: Callable[[Moment], object] = lambda moment: moment.synchronize(),
    ):
        self._model, self._cache, self._samples = model, cache, samples
        self._gpu, self._wait = gpu, wait
        self.graphs = DecodeGraphs(model, cache, gpu, takes_states) if gpu and graphs else None

    def __call__(self, work: Work, x: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A piece's states [rows, hidden] after this rank's layers, of x after those of the stage before; and the
        tokens that follow, int64 [tokens], on the host, where this rank samples. All is done when this returns.
        """
        states = self.graphs.states(work, x) if self.graphs else None
        if states is None:
            batch = work.batch(self._gpu)
            states = self._model.forward(batch, self._cache, x)
            tokens = self._model.next_tokens(states, batch) if self._samples else None
        else:
            tokens = self._sampled(work, states) if self._samples else None
            states = states if self._samples else states[: len(work.tokens)].clone()  # which are sent meanwhile
        return states, self._done(tokens)

    @torch.inference_mode()
    def _sampled(self, work: Work, states: torch.Tensor) -> torch.Tensor:
        """The token after each of a decoding piece's rows."""
        sampling = None if work.sampling is None else Sampling(*send(work.sampling, self._gpu))
        return self._model.sample(states[: work.computed], sampling)

    def _done(self, tokens: torch.Tensor | None) -> torch.Tensor | None:
        """Wait until everything is done, and the tokens are on the host."""
        if self._gpu is None:
            return tokens
        host = None
        if tokens is not None:
            host = self._gpu.pinned(tokens.nbytes).view(tokens.dtype)
            if len(tokens):
                self._gpu.copy(host, tokens)
        self._wait(self._gpu.moment())
        return host
