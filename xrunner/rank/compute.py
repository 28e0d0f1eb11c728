"""Compute: a rank's share of a micro-batch on its device.

On a GPU everything is queued: a batch is launched first, and completes later.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from xrunner.comm.gpu import DeviceEvent, Gpu
from xrunner.comm.packing import send
from xrunner.models import Between, Dealing, KVCache, Model, Planning
from xrunner.rank.assembly import DeviceBatch
from xrunner.rank.iteration_graphs import IterationGraph, IterationGraphs
from xrunner.rank.sampling_state import SamplingState


@dataclass(frozen=True)
class Launched:
    """A micro-batch that a device is computing."""

    states: torch.Tensor
    """[rows, hidden]: after this rank's layers."""
    tokens: torch.Tensor | None
    """int64, on the host: on the sampling rank, what `Model.sample` returns; else None."""
    moment: DeviceEvent | None
    """The event when both are complete; None: they are complete already."""


class Compute:
    """One rank's layers and its sampling.

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
        wait: Callable[[DeviceEvent, Between], object] = lambda moment, between: moment.synchronize(),
    ):
        self._model, self._cache, self._samples = model, cache, samples
        self._gpu, self._wait = gpu, wait
        self.state = SamplingState(model.spec.vocab, model.device) if samples else None
        self._dealing, self.planning = Dealing.of(model, cache), Planning.of(model, cache)
        self._last = torch.empty(0)
        """The tokens sampled last, on the device: int64 [tokens], followed by log-probabilities if asked for."""
        self.model_s = 0.0
        """Seconds of the host in `forward` and `next_tokens`, for the profiler; graphs don't count."""
        self.graphs = None
        if gpu and graphs:
            self.graphs = IterationGraphs(model, cache, gpu, samples, takes_states, self.planning)

    def __call__(self, batch: DeviceBatch, x: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a batch's states [rows, hidden] and, on the sampling rank, `Model.sample`'s result on the host.

        x are the states of the stage before. Everything is complete when this returns.
        """
        launched = self.launch(batch, x)
        self.complete(launched)
        return launched.states, launched.tokens

    def launch(self, batch: DeviceBatch, x: torch.Tensor | None, between: Between = lambda: None) -> Launched:
        """Compute a batch, given the states x [rows, hidden] of the stage before.

        `between` is called between layers, unless one graph computes all of them.
        """
        graph = self.graphs.replay(batch, x, self._feed) if self.graphs else None
        if graph is None:
            tensors = batch.with_work_lists(self._dealing).to_device(self._gpu, self.state)
            self._feed(batch, tensors.tokens)
            if self.planning:
                tensors = self.planning.planned(tensors, batch.attention)
            start = time.perf_counter()
            states = self._model.forward(tensors, self._cache, x, between)
            tokens = self._model.next_tokens(states, tensors) if self._samples else None
            self.model_s += time.perf_counter() - start
        elif self._samples:
            states, tokens = graph.states, self._sampled(graph, batch)
        else:
            states, tokens = (
                graph.states[: len(batch.tokens)].clone(),
                None,
            )  # the graph's own are overwritten by the next batch
        return self._launched(states, tokens)

    def _feed(self, batch: DeviceBatch, tokens: torch.Tensor) -> None:
        """Copy the tokens sampled last into a batch's input, int64 [rows], if the batch takes them."""
        if batch.fed is not None:
            rows, places = send(batch.fed, self._gpu)
            # `NO_TOKEN` has no embedding; what follows it is ignored.
            tokens.index_copy_(0, rows, self._last.index_select(0, places).clamp_(min=0))

    def _sampled(self, graph: IterationGraph, batch: DeviceBatch) -> torch.Tensor:
        """Return what `Model.next_tokens` returns after a graph; by the graph if all tokens are greedy."""
        if batch.new_tokens and batch.sampling is None and batch.logprobs is None and batch.prompt_logprobs is None:
            return graph.greedy_tokens()[: batch.new_tokens]
        sampled = batch.sampled(graph.batch, iter(send(batch.sampling_arrays, self._gpu)), self.state)
        return self._model.next_tokens(graph.states[: len(batch.tokens)], sampled)

    def _launched(self, states: torch.Tensor, tokens: torch.Tensor | None) -> Launched:
        """Return the queued batch, with the tokens' copy to the host."""
        if self._gpu is None:
            return Launched(states, tokens, None)
        host = None
        if tokens is not None:
            self._last = tokens
            host = self._gpu.pinned(tokens.nbytes).view(tokens.dtype)
            if len(tokens):
                self._gpu.copy(host, tokens)
        return Launched(states, host, self._gpu.moment())

    def complete(self, launched: Launched, between: Between = lambda: None) -> None:
        """Wait until a batch is complete."""
        if launched.moment is not None:
            self._wait(launched.moment, between)
