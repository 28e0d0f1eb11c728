"""Compute: a rank's share of a micro-batch on its device. On a GPU everything is queued; only tokens are waited for."""

from collections.abc import Callable

import torch

from exegpt.models import Between, Dealing, KVCache, Model, Planning
from xrunner.comm.gpu import Gpu, Moment
from xrunner.comm.packing import send
from xrunner.rank.assembly import DeviceBatch
from xrunner.rank.decode_graphs import DecodeGraph, DecodeGraphs
from xrunner.rank.sampling_state import SamplingState


class Compute:
    """One rank's layers, and its sampling.

    `gpu` is None on the CPU. `graphs`: whether the layers can be captured in CUDA graphs. `takes_states`: whether
    another stage is before this one. `wait` waits for the event at the end of every micro-batch, and calls `between`
    meanwhile.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        samples: bool,
        gpu: Gpu | None = None,
        graphs: bool = False,
        takes_states: bool = False,
        wait: Callable[[Moment, Between], object] = lambda moment, between: moment.synchronize(),
    ):
        self._model, self._cache, self._samples = model, cache, samples
        self._gpu, self._wait = gpu, wait
        self.state = SamplingState(model.spec.vocab, model.device) if samples else None
        self._dealing, self.planning = Dealing.of(model, cache), Planning.of(model, cache)
        self.graphs = None
        if gpu and graphs:
            self.graphs = DecodeGraphs(model, cache, gpu, samples, takes_states, self.planning)

    def __call__(
        self, batch: DeviceBatch, x: torch.Tensor | None, between: Between = lambda: None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A batch's states [rows, hidden] after this rank's layers, given x after those of the stage before, and where
        this rank samples the new tokens, int64 [tokens], on the host. Everything is complete when this returns.
        `between` is called between layers, unless one graph has them all.
        """
        graph = self.graphs.replay(batch, x) if self.graphs else None
        if graph is None:
            tensors = batch.with_work_lists(self._dealing).to_device(self._gpu, self.state)
            if self.planning:
                tensors = self.planning.planned(tensors, batch.attention)
            states = self._model.forward(tensors, self._cache, x, between)
            tokens = self._model.next_tokens(states, tensors) if self._samples else None
        elif self._samples:
            states, tokens = graph.states, self._sampled(graph, batch)
        else:
            states, tokens = (
                graph.states[: len(batch.tokens)].clone(),
                None,
            )  # the graph's own are overwritten by the next batch
        return states, self._completed(tokens, between)

    def _sampled(self, graph: DecodeGraph, batch: DeviceBatch) -> torch.Tensor:
        """The token after each of a decoding batch's rows, by the graph where all are greedy."""
        if batch.sampling is None or self.state is None:
            return graph.greedy_tokens()[: batch.computed]
        sampling = self.state.sampling(batch.sampling, send(batch.sampling, self._gpu))
        return self._model.sample(graph.states[: batch.computed], sampling)

    def _completed(self, tokens: torch.Tensor | None, between: Between) -> torch.Tensor | None:
        """Wait until everything is complete; returns the tokens on the host."""
        if self._gpu is None:
            return tokens
        host = None
        if tokens is not None:
            host = self._gpu.pinned(tokens.nbytes).view(tokens.dtype)
            if len(tokens):
                self._gpu.copy(host, tokens)
        self._wait(self._gpu.moment(), between)
        return host
