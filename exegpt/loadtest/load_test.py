"""`exegpt bench serve`: load an endpoint at each requested rate and measure it."""

import asyncio
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from exegpt.loadtest.endpoint import PATHS, Endpoint, find_endpoint, http_request
from exegpt.loadtest.measurements import RequestBounds, RunMeasurements, measure
from exegpt.loadtest.open_loop import LoadRequest, SendLimits, Sent, send_all
from exegpt.loadtest.request_outcome import REJECTED
from exegpt.loadtest.request_prompts import VOCAB, Prompt, id_prompts, text_prompts, tokenizer_of
from exegpt.options.bench_serve import LoadOptions
from xcore import document
from xcore.arrays import Array
from xcore.choices import check_choice, check_columns
from xcore.columns import parse_columns
from xcore.duration import duration_text, parse_duration
from xcore.errors import InputError
from xcore.files import check_distinct, check_output
from xcore.specs.workload import RequestLengths, Workload
from xcore.traces.arrivals import BURSTINESS, KINDS, parse_rates, random_arrivals, random_arrivals_until, trace_arrivals
from xcore.traces.fit_context import fit_to_context
from xcore.traces.trace import parse_workload

if TYPE_CHECKING:
    from tokenizers import Tokenizer


DRAWN = 100
"""Default number of requests."""
LENGTHS = "128/64"
"""The default workload."""
_LENGTHS, _ARRIVALS, _PROMPTS, _WARM_UP = range(4)  # second part of a generator's seed, after the user's


@dataclass(frozen=True)
class RequestLoad:
    """The requests and their endpoint, from checked options."""

    options: LoadOptions
    endpoint: Endpoint
    workload: Workload
    rates: tuple[float | None, ...]
    """Requests per second, `inf` for all at once; None: a trace's own arrivals."""
    burstiness: float
    duration_s: float | None
    bounds: RequestBounds
    sending: SendLimits
    ids: bool
    """Whether prompts are token ids."""
    vocab: int
    tokenizer: "Tokenizer | None"
    notes: tuple[str, ...]


def plan(options: LoadOptions) -> RequestLoad:
    """Return the load for these options; asks the endpoint for its model.

    Raises InputError for options that can't be combined.
    """
    _check(options)
    notes: list[str] = []
    named = parse_columns(options.columns) if options.columns else None
    if options.workload is None:
        notes.append(f"lengths: {LENGTHS}, the default (--workload)")
    workload = parse_workload(options.workload or LENGTHS, named, note=notes.append)
    rates = _rates(options, workload)
    bounds = RequestBounds(*(parse_duration(text) if text else None for text in _bounds(options)))
    tokenizer = tokenizer_of(options.tokenizer)
    ids = (options.prompts or ("text" if options.api == "chat" else "ids")) == "ids"
    endpoint = find_endpoint(options.url, options.model)
    if endpoint.context is not None:
        workload, scaling = fit_to_context(workload, endpoint.context, endpoint.model, options.scale_to_context)
        notes += scaling
    vocab = options.vocab or (tokenizer.get_vocab_size() if tokenizer else VOCAB)
    if ids and not options.vocab and not tokenizer:
        notes.append(f"prompts: random token ids below {VOCAB} (--vocab, --tokenizer)")
    elif not ids and not tokenizer:
        notes.append("prompts: random words, each counted as one token (--tokenizer counts exactly)")
    return RequestLoad(
        options,
        endpoint,
        workload,
        rates,
        _burstiness(options),
        parse_duration(options.duration) if options.duration else None,
        bounds,
        SendLimits(parse_duration(options.timeout), options.retry, options.max_concurrency),
        ids,
        vocab,
        tokenizer,
        tuple(notes),
    )


def run(load: RequestLoad, say: Callable[[str], None]) -> list[RunMeasurements]:
    """Warm up, then load the endpoint at each rate, one after the other; write the results after each run.

    Once one stream of the endpoint has ended with [DONE], streams without it count as failures. Earlier runs are then
    evaluated again.
    """
    requires_done = _warm_up(load).has_done if load.options.warm_up else False
    sents, measured, lines = list[Sent](), list[RunMeasurements](), list[list[str]]()
    for place, rate in enumerate(load.rates):
        requests = _requests(load, place)
        last = duration_text(requests[-1].arrival_s)
        say(f"{rate_text(rate)}: {len(requests):,} requests, the last one arrives after {last} …")
        sents.append(asyncio.run(send_all(load.endpoint.address, requests, load.sending)))
        again = place if requires_done or not sents[-1].has_done else 0
        requires_done = requires_done or sents[-1].has_done
        counted = [sent.requiring_done() if requires_done else sent for sent in sents[again:]]
        rates = load.rates[again : place + 1]
        measured[again:] = [measure(sent, at, load.bounds) for sent, at in zip(counted, rates, strict=True)]
        if load.options.out:
            lines[again:] = map(_lines, counted, measured[again:])
            document.write_text(load.options.out, "\n".join(line for of_run in lines for line in of_run) + "\n")
    return measured


def _lines(sent: Sent, run: RunMeasurements) -> list[str]:
    """Return the results of a run's requests, in the order of their ends."""
    outcomes = sorted(sent.outcomes, key=lambda outcome: outcome.finish_s)
    return [document.dumps(outcome.document(run.rate_seq_s), indent=None) for outcome in outcomes]


def rate_text(rate: float | None) -> str:
    """Return a rate as text for people."""
    if rate is None:
        return "trace"
    return "all at once" if math.isinf(rate) else f"{rate:g}/s"


def _bounds(options: LoadOptions) -> tuple[str | None, str | None, str | None]:
    return options.latency_bound, options.ttft, options.tpot


def _check(options: LoadOptions) -> None:
    """Raise InputError for invalid options, before anything is read."""
    if importlib.util.find_spec("httptools") is None:
        raise InputError("`exegpt bench serve` needs httptools, which isn't installed: pip install 'exegpt[serve]'.")
    check_choice(options.api, tuple(PATHS), "--api")
    check_choice(options.arrivals, KINDS, "--arrivals")
    check_choice(options.prompts or "ids", ("ids", "text"), "--prompts")
    if options.api == "chat" and options.prompts == "ids":
        raise InputError("--prompts ids cannot be combined with --api chat, which takes texts: leave one of them out.")
    if options.num and options.duration:
        raise InputError("--num and --duration both determine the number of requests: leave one of them out.")
    if options.burstiness is not None and options.arrivals != "burst":
        raise InputError(f"--burstiness {options.burstiness:g} needs --arrivals burst: pass it, or leave both out.")
    if not options.max_tokens_factor >= 1 or math.isinf(options.max_tokens_factor):
        raise InputError(f"--max-tokens-factor {options.max_tokens_factor:g} must be a number of at least 1.")
    if options.duration and parse_duration(options.duration) is None:
        raise InputError("--duration inf never ends: write a time, like 60s.")
    check_columns(options.columns, options.workload, scale=options.scale_to_context)
    for path in (options.out, options.report):
        check_output(path)
    check_distinct((options.out, options.report), (options.workload,))


def _burstiness(options: LoadOptions) -> float:
    if options.arrivals != "burst":
        return 1.0
    return BURSTINESS if options.burstiness is None else options.burstiness


def _rates(options: LoadOptions, workload: Workload) -> tuple[float | None, ...]:
    rates = parse_rates(options.rate) if options.rate else ()
    if options.arrivals == "trace":
        if workload.requests is None:
            raise InputError(f"--arrivals trace needs a trace: '{options.workload or LENGTHS}' has no arrivals.")
        if math.inf in rates:
            raise InputError("--arrivals trace cannot be combined with --rate inf: leave one of them out.")
        return rates or (None,)
    if not rates:
        raise InputError("No rate is given: pass --rate 5/s, several rates like --rate 1/s,2/s,4/s, or --rate inf.")
    if math.inf in rates and options.duration:
        raise InputError(f"--rate inf sends all at once, so --duration {options.duration} has no effect: pass --num.")
    return rates


def _arrivals(load: RequestLoad, place: int) -> Array:
    """Return the arrival times in the run of the rate at `place`, in seconds [n]."""
    options, rate, seed = load.options, load.rates[place], (load.options.seed, _ARRIVALS, place)
    if options.arrivals == "trace":
        assert load.workload.requests is not None
        arrivals = trace_arrivals([row.arrival_s for row in load.workload.requests], rate)
        if options.num is not None and options.num > len(arrivals):
            raise InputError(f"--num {options.num} is more than the trace's {len(arrivals):,} requests: lower it.")
        return arrivals[: options.num] if load.duration_s is None else arrivals[arrivals < load.duration_s]
    assert rate is not None
    if load.duration_s is None:
        return random_arrivals(rate, options.num or DRAWN, seed, load.burstiness)
    return random_arrivals_until(load.duration_s, rate, seed, load.burstiness)


def _requests(load: RequestLoad, place: int) -> list[LoadRequest]:
    """Return the requests of the run at a rate.

    Runs share lengths, but not prompts, because a server would have cached them.
    """
    arrivals, context = _arrivals(load, place), load.endpoint.context
    workload = load.workload
    if load.options.arrivals == "trace" and workload.requests is not None:
        by_arrival = sorted(workload.requests, key=lambda row: row.arrival_s)
        workload = replace(workload, requests=tuple(by_arrival))
    rows = workload.draw(len(arrivals), load.options.seed, context)
    return _made(load, rows, arrivals, (load.options.seed, _PROMPTS, place))


def _made(
    load: RequestLoad, rows: Sequence[RequestLengths], arrivals: Sequence[float] | Array, seed: tuple[int, ...]
) -> list[LoadRequest]:
    lengths = [row.input for row in rows]
    prompts = id_prompts(lengths, load.vocab, seed) if load.ids else text_prompts(lengths, load.tokenizer, seed)
    return [
        _request(load, index, prompt, row, float(arrival))
        for index, (prompt, row, arrival) in enumerate(zip(prompts, rows, arrivals, strict=True))
    ]


def _request(load: RequestLoad, index: int, prompt: Prompt, row: RequestLengths, arrival_s: float) -> LoadRequest:
    options, (content, prompt_tokens) = load.options, prompt
    most = math.ceil(options.max_tokens_factor * row.output)
    if load.endpoint.context is not None:
        most = max(row.output, min(most, load.endpoint.context - row.input))
    body: dict[str, object] = {"model": load.endpoint.model}
    if options.api == "chat":
        body["messages"] = [{"role": "user", "content": content}]
    else:
        body["prompt"] = content
    cut_at = row.output if options.ignore_eos and most > row.output else None
    body |= {"max_tokens": most, "temperature": options.temperature, "stream": True}
    # vLLM's key: each chunk has the number of tokens.
    counted = {} if cut_at is None else {"continuous_usage_stats": True}
    body["stream_options"] = {"include_usage": True, **counted}
    if options.ignore_eos:
        body["ignore_eos"] = True
    data = http_request(load.endpoint.address, PATHS[options.api], body)
    return LoadRequest(index, data, prompt_tokens, row.output, arrival_s, cut_at)


def _warm_up(load: RequestLoad) -> Sent:
    """Send requests that aren't measured, all at once; InputError if one fails, because all others would too."""
    num = load.options.warm_up
    rows = load.workload.draw(num, load.options.seed, load.endpoint.context)
    requests = _made(load, rows, [0.0] * num, (load.options.seed, _WARM_UP))
    sent = asyncio.run(send_all(load.endpoint.address, requests, load.sending))
    for outcome in sent.outcomes:
        if outcome.error not in (None, REJECTED):
            why = f"{outcome.error}: {outcome.message or 'no message'}"
            raise InputError(
                f"The endpoint failed to answer a warm-up request ({why}), so nothing was measured: correct its cause."
            )
    return sent
