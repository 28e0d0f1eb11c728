"""Convert a client's sampling parameters to requests of the engine."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from xcore.requests.request import Request
from xcore.requests.requests import LATEST_S
from xcore.traces.labels import Labels
from xcore.traces.trace import LABELS
from xserver.http.api_error import invalid
from xserver.http.schemas import Sampled

GREEDY_BELOW = 1e-4
"""Lower temperatures are greedy: dividing logits by them overflows."""
LEAST_TOP_P = 1e-6
"""`top_p` 0 keeps one token."""
_GENERATOR = random.Random()
"""Seeded by the operating system once: a call of it for each request takes longer than many refusals."""
_SEEDS = 2**63
_LONGEST_LABEL = 512
"""Most characters of a value in OpenAI's metadata."""


@dataclass(frozen=True)
class Wanted:
    """What an endpoint requests for an output besides sampling parameters."""

    grammar: str | None = None
    """The grammar of the output; None: any output."""
    grammar_param: str = "response_format"
    """The key of the body that gave the grammar."""
    logprobs: int | None = None
    """Likeliest tokens whose log-probabilities are reported; None: no log-probabilities."""
    prompt_logprobs: bool = False
    """Whether log-probabilities of the prompt are reported too."""
    named: frozenset[int] = frozenset()
    """Special tokens whose names are a part of the text."""


def random_seed() -> int:
    """Return a seed for a request without a seed."""
    return _GENERATOR.randrange(_SEEDS)


def requests_of(
    body: Sampled,
    prompt_ids: Sequence[int],
    max_tokens: int,
    vocab: int,
    wanted: "Wanted",
    place: int = 0,
    client: str | None = None,
) -> list[Request]:
    """Return a request for each of a prompt's `n` choices, with different seeds.

    `place` is the prompt's index among several, `client` whom it comes from. The engine link assigns the ids.
    """
    if (body.min_tokens or 0) > max_tokens:
        raise invalid(f"'min_tokens' exceeds the {max_tokens} tokens that the output may have.", "min_tokens")
    if any(token >= vocab for token in body.stop_token_ids or ()):
        raise invalid(f"'stop_token_ids' has a token id above {vocab - 1}.", "stop_token_ids")
    seed = random_seed() if body.seed is None else body.seed
    n, temperature = body.n or 1, 1.0 if body.temperature is None else body.temperature
    labels = _run_labels(body.metadata or {})
    common = Request(
        id="",
        prompt_ids=tuple(prompt_ids),
        max_tokens=max_tokens,
        ignore_eos=bool(body.ignore_eos),
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else max(LEAST_TOP_P, body.top_p),
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=_logit_bias(body, vocab),
        min_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(dict.fromkeys(body.stop_token_ids or ())),
        grammar=wanted.grammar,
        logprobs=wanted.logprobs,
        prompt_logprobs=wanted.prompt_logprobs,
        cache_salt=body.cache_salt,
        client=client,
        application=labels.application,
        run=labels.run,
        unit=labels.unit,
        deadline_s=labels.deadline_s,
    )
    return [replace(common, seed=_mixed(seed, place * n + i)) for i in range(n)]


def _mixed(seed: int, index: int) -> int:
    """Return a seed of 63 bits for a choice: (seed, index) mixed as in SplitMix64, or the seed itself for index 0."""
    if index == 0:
        return seed
    mask = 2**64 - 1
    z = (seed + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1


def _run_labels(metadata: Mapping[str, object]) -> Labels:
    """Return the labels of an application's run in a request's metadata, as far as it has any."""
    labels: dict[str, str] = {}
    for key in LABELS[1:]:
        value = metadata.get(key)
        if value is None:
            continue
        if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_LABEL:
            raise invalid(
                f"'metadata' has a '{key}' that is not a text of 1 to {_LONGEST_LABEL} characters.", "metadata"
            )
        labels[key] = value
    deadline = labels.pop("deadline_s", None)
    deadline_s = None if deadline is None else _seconds(deadline)
    return Labels(**labels, client=None, deadline_s=deadline_s, after_s=None)


def _seconds(text: str) -> float:
    """Return a deadline that is written as a text."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= LATEST_S:
        raise invalid(
            f"'metadata' has a 'deadline_s' that is not a number of seconds from 0 to {LATEST_S:,}.", "metadata"
        )
    return seconds


def _logit_bias(body: Sampled, vocab: int) -> tuple[tuple[int, float], ...]:
    biases = {}
    for text, bias in (body.logit_bias or {}).items():
        if not (text.isascii() and text.isdigit()) or len(text) > 10 or int(text) >= vocab:
            raise invalid(f"'logit_bias' has a key that is not a token id from 0 to {vocab - 1}.", "logit_bias")
        biases[int(text)] = float(bias)
    return tuple(biases.items())


def stop_texts(body: Sampled) -> tuple[str, ...]:
    """Return the texts that end an output."""
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
