"""The options of `exegpt bench`."""

from dataclasses import dataclass
from pathlib import Path

from exegpt.options import groups
from exegpt.options.record import option, required


@dataclass(frozen=True, kw_only=True)
class BenchOptions(groups.TraceOptions, groups.DeviceOptions, groups.PluginOptions):
    """What is run and compared, and how often."""

    schedule: Path = required(groups.SCHEDULE_HELP, "-s")
    model: str = groups.MODEL_DIRECTORY
    requests: str | None = option(None, "A file of requests: JSONL, or a trace.", "-r")
    workload: str | None = groups.WORKLOAD
    num: int | None = option(None, "Requests drawn from --workload. Default: 64.", "-n", min=1)
    profile: str | None = groups.PROFILE
    policy: str | None = option(None, "Also run the best schedules of these policies, or of `all`.")
    peers: str | None = option(None, "Also run the requests with these engines: transformers.")
    repeats: int = option(3, "Runs of each schedule; the median run is reported.", min=1)
    rate: str | None = groups.RATE
    seed: int = groups.SEED
    report: Path | None = groups.REPORT
