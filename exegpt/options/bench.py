"""The options of `exegpt bench`."""

from dataclasses import dataclass
from pathlib import Path

from exegpt.options import shared_options
from exegpt.options.option_record import option, required


@dataclass(frozen=True, kw_only=True)
class BenchOptions(shared_options.TraceOptions, shared_options.DeviceOptions, shared_options.PluginOptions):
    """The runs to compare, and their number."""

    schedule: Path = required(shared_options.SCHEDULE_HELP, "-s")
    model: str = shared_options.MODEL_DIRECTORY
    requests: str | None = option(None, "A file of requests: JSONL, or a trace.", "-r")
    workload: str | None = shared_options.WORKLOAD
    num: int | None = option(None, "Requests drawn from --workload. Default: 64.", "-n", min=1)
    profile: str | None = shared_options.PROFILE
    policy: str | None = option(None, "Also run the best schedules of these policies, or of `all`.")
    peers: str | None = option(None, "Also run the requests with these engines: transformers.")
    repeats: int = option(3, "Runs of each schedule; the median run is reported.", min=1)
    rate: str | None = shared_options.RATE
    seed: int = shared_options.SEED
    report: Path | None = shared_options.REPORT
