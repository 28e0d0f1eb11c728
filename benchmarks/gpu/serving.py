"""The engine beside transformers' continuous batching: the same weights, requests and device, at the same bound."""

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.model_sizes import ModelSizes
from exegpt.api import peers
from exegpt.api.compare import execute
from xcore.console.schedule_text import schedule_text
from xcore.requests.request import Request
from xcore.requests.requests import random_requests
from xcore.specs.bound import PAPER_BOUND
from xcore.specs.model import ModelSpec
from xcore.specs.request_times import summarise
from xprofiler.measure import measure_profile
from xrunner.models import load_model
from xscheduler.setting_search import search_schedule
from xscheduler.settings import Setting, find_setting

TINYLLAMA = ModelSpec("TinyLlama-1.1B", "llama", 22, 2048, 32, 4, 64, 5632, True, 32000, 2048)
"""Sizes of a model whose weights are drawn, written and read within seconds."""
PEER_BATCHES = (256, 512)
_WARM_UP = 32
"""Requests of the warm-up, which is not timed."""


@dataclass(frozen=True)
class Serving:
    """One way of serving the requests."""

    name: str
    setting: str
    tokens_s: float
    """Output tokens per second."""
    latency_s: float
    """Of the bound's sequence."""
    bound_s: float = math.inf
    ratio: float | None = None
    """Of ours: its tokens per second over those of the peer whose latency is the bound."""
    error: float | None = None
    """Of ours: how far the measured throughput is from the predicted one, as a share of the measured."""


def measured_model(folder: Path, sizes: ModelSpec, dtype: str, device: torch.device) -> tuple[Path, Setting]:
    """A Llama of these sizes with random weights in the folder, and task T on this device, which is profiled."""
    directory = folder / sizes.name
    kept = ModelSizes(sizes.layers, sizes.hidden, sizes.heads, sizes.ffn, sizes.vocab, sizes.context, sizes.kv_heads)
    kept.create(directory, seed=0, dtype=dtype)
    measure_profile(directory, dtype, device=device)
    return directory, find_setting(str(directory), "local", "T", dtype=dtype, device=device.type)


def serve(
    directory: Path,
    setting: Setting,
    number: int,
    device: torch.device,
    batches: Sequence[int] = PEER_BATCHES,
    report: Callable[[str], object] = print,
) -> list[Serving]:
    """`number` requests of a setting by the peer with at most so many at a time, then by ours: the best schedule under
    the latency that the fastest of the peer's runs kept. Both are warmed up.
    """
    model, dtype = setting.model, setting.profile.dtype
    requests = random_requests(setting.workload.draw(number, 0, model.longest_request), model.vocab, 0)
    theirs = _peers(directory, dtype, requests, device, batches, report)
    gc.collect()  # their model, whose memory ours needs
    best = max(theirs, key=lambda row: row.tokens_s)
    answer = search_schedule(setting, best.latency_s, most_resident=number)
    if answer.schedule is None:
        raise RuntimeError(f"no schedule keeps {best.latency_s:.3g} s, which transformers does")
    report(f"running {schedule_text(answer.schedule)} under {best.latency_s:.3g} s")
    done = execute(load_model(directory, dtype, device=device), answer.schedule, setting.profile, requests)
    latency_s, tokens_s = done.measured.latency_s or math.nan, done.measured.throughput_tok_s
    ratio, error = tokens_s / best.tokens_s, done.error()["throughput_tok_s"]
    return [
        *theirs,
        Serving("exegpt", schedule_text(answer.schedule), tokens_s, latency_s, best.latency_s, ratio, error),
    ]


def _peers(
    directory: Path,
    dtype: str,
    requests: Sequence[Request],
    device: torch.device,
    batches: Sequence[int],
    report: Callable[[str], object],
) -> list[Serving]:
    """The peer's rows; its failures are printed; RuntimeError where all of it fails."""
    model, rows = peers.load(directory, dtype, device), []
    for most in batches:
        report(f"transformers continuous batching, at most {most}: {_WARM_UP} requests, then {len(requests)}")
        try:
            peers.continuous(model, requests[:_WARM_UP], most)
            run = peers.continuous(model, requests, most)
        except Exception as error:  # a peer's, whatever it is
            report(f"transformers continuous batching, at most {most}: {type(error).__name__}: {error}")
            continue
        latency_s = summarise(run.served, run.seconds, PAPER_BOUND).latency_s or math.nan
        rows.append(Serving("transformers continuous batching", f"at most {most}", run.tokens_s, latency_s))
        report(text(rows[-1]))
    if not rows:
        raise RuntimeError("transformers' continuous batching serves nothing here")
    return rows


def text(row: Serving) -> str:
    """A line of the report."""
    line = f"{row.name}, {row.setting}: {row.tokens_s:.0f} tokens/s, latency {row.latency_s:.3g} s"
    if row.ratio is None:
        return line
    assert row.error is not None
    return f"{line} under {row.bound_s:.3g} s, {row.ratio:.2f} times the peer's, {row.error:+.1%} from the prediction"


def document(row: Serving) -> dict[str, object]:
    """The row as JSON, without infinities."""
    return {key: value if value != math.inf else None for key, value in asdict(row).items()}
