"""What iteration-level policies share: a steady state is a mixture of iterations, and a query lives through many."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from exegpt.estimate import Estimate
from xsimulator.scenario import Lifetime, Scenario
from xsimulator.steady_state import length_biased_context

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Mixture:
    """Kinds of iterations, arrays [kinds]."""

    weight: Array
    """Share of the iterations; sums to 1."""
    prompts: Array
    """Prompts, or pieces, encoded."""
    prompt_tokens: Array
    decoding: Array
    """Sequences decoded beside them."""
    prefill_iterations: float
    """Iterations that one prompt's encoding takes."""


def iteration_seconds(scenario: Scenario, mixture: Mixture) -> Array:
    """Seconds of each kind of iteration, [kinds, stages]."""
    context = length_biased_context(scenario.workload, scenario.encoder_decoder)
    law = scenario.workload.input
    columns = []
    for cost in scenario.costs:
        seconds = cost.mixed(mixture.prompt_tokens, mixture.prompts, mixture.decoding, context)
        some = mixture.prompts > 0
        whole = mixture.prompts * law.mean
        share = np.divide(mixture.prompt_tokens, whole, out=np.zeros_like(whole), where=some)
        attention = cost.encode_attention(np.maximum(mixture.prompts, 1.0), law)
        columns.append(seconds + some * share * attention)
    return np.stack(columns, axis=1)


def from_iterations(scenario: Scenario, mixture: Mixture, rate: float, max_num_seqs: int) -> Estimate:
    """The Estimate of a steady state in which `rate` queries enter an iteration.

    On a pipeline as many micro-batches as stages are under way, each with its share of the sequences: an iteration of
    all takes the slowest stage's time once for every micro-batch, and a token the sum of the stages or that, whichever
    is longer.
    """
    stages = len(scenario.stages)
    if stages == 1:
        seconds = iteration_seconds(scenario, mixture)
        length, busy = seconds.sum(axis=1), np.ones(1)
    else:
        part = Mixture(
            mixture.weight,
            mixture.prompts / stages,
            mixture.prompt_tokens / stages,
            mixture.decoding / stages,
            mixture.prefill_iterations,
        )
        seconds = iteration_seconds(scenario, part)
        hop = scenario.send(float(part.prompt_tokens @ part.weight + part.decoding @ part.weight))
        length = np.maximum(stages * seconds.max(axis=1), seconds.sum(axis=1) + (stages - 1) * hop)
        busy = stages * (mixture.weight @ seconds) / float(mixture.weight @ length)
    mean = float(mixture.weight @ length)
    deviation = float(np.sqrt(mixture.weight @ (length - mean) ** 2))
    own = mixture.weight * mixture.prompts
    with_prompt = float(own @ length / own.sum()) if own.sum() else mean
    first = mixture.prefill_iterations * with_prompt
    shift = 0.0 if scenario.encoder_decoder or scenario.form == "paper" else 1.0

    def lifetime(lengths: Array) -> Lifetime:
        need = np.maximum(lengths - shift, 0.0)
        return Lifetime(first + need * mean, deviation * np.sqrt(need + 1.0), deviation * np.sqrt(need))

    alone = Mixture(mixture.weight, mixture.prompts * 0, mixture.prompt_tokens * 0, mixture.decoding, 0.0)
    decode_share = float(mixture.weight @ iteration_seconds(scenario, alone).sum(axis=1)) / max(
        float(mixture.weight @ iteration_seconds(scenario, mixture).sum(axis=1)), 1e-300
    )
    return scenario.estimate(
        throughput=rate / mean,
        lifetime=lifetime,
        first_token=(first, deviation),
        blocks=blocks(scenario, max_num_seqs),
        tokens=float((mixture.prompt_tokens + mixture.decoding).max()),
        busy=busy,
        binding="decoding" if decode_share > 0.5 else "encoding",
    )


def blocks(scenario: Scenario, max_num_seqs: int) -> int:
    """KV blocks that so many residents hold, its 99.9th percentile."""
    return scenario.biased_reservation.quantile(max_num_seqs, max_num_seqs)
