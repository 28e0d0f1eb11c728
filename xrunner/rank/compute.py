"""Compute: what a rank does with a piece on its device. On a GPU all is queued, and tokens are waited for alone."""

from collections.abc import Callable

import torch

from exegpt.models import Dealing, KVCache, Model
from xrunner.comm.gpu import Gpu, Moment
from xrunner.comm.packing import send
from xrunner.rank.assembly import Work
from xrunner.rank.decode_graphs import DecodeGraph, DecodeGraphs
from xrunner.rank.sampling_state import SamplingState


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
        self.state = SamplingState(model.spec.vocab, model.device) if samples else None
        self._dealing = Dealing.of(model, cache)
        self.graphs = DecodeGraphs(model, cache, gpu, samples, takes_states) if gpu and graphs else None

    def __call__(self, work: Work, x: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A piece's states [rows, hidden] after this rank's layers, of x after those of the stage before; and the
        tokens that follow, int64 [tokens], on the host, where this rank samples. All is done when this returns.
        """
        graph = self.graphs.replay(work, x) if self.graphs else None
        if graph is None:
            batch = work.dealt(self._dealing).batch(self._gpu, self.state)
            states = self._model.forward(batch, self._cache, x)
            tokens = self._model.next_tokens(states, batch) if self._samples else None
        elif self._samples:
            states, tokens = graph.states, self._chosen(graph, work)
        else:
            states, tokens = graph.states[: len(work.tokens)].clone(), None  # the graph's own go on being overwritten
        return states, self._done(tokens)

    def _chosen(self, graph: DecodeGraph, work: Work) -> torch.Tensor:
        """The token after each of a decoding piece's rows, by the graph where all are chosen greedily."""
        if work.sampling is None or self.state is None:
            return graph.greedy_tokens()[: work.computed]
        sampling = self.state.sampling(work.sampling, send(work.sampling, self._gpu))
        return self._model.sample(graph.states[: work.computed], sampling)

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
