"""The options of `exegpt plan`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from exegpt.options import shared_options
from exegpt.options.option_record import argument, option, required

if TYPE_CHECKING:
    from xscheduler.settings import SettingKeywords


@dataclass(frozen=True, kw_only=True)
class PlanOptions(shared_options.PredictionOptions, shared_options.PluginOptions):
    """The models, the cluster and the method, and the file for the plan."""

    file: Path = argument("A YAML file of models, each with its workload, rate and latency bound.")
    cluster: str = required(shared_options.CLUSTER_HELP, "-c")
    method: str = option(
        "exegpt",
        "The method: exegpt (joint search of all budgets), muxserve, temporal, seallm, alpaserve, spatial, samullm "
        "(stages, for numbers of requests), samullm-max or samullm-min (its heuristic baselines), or best (the best of "
        "all but these two).",
    )
    replicas: int | None = option(
        None,
        "The most groups of devices that may have a replica of the same model (seallm, alpaserve). Default: no limit.",
        min=1,
    )
    one_node: bool = option(
        False,
        "Give each model devices of a single node, so that `exegpt serve --plan` can run the plan on several nodes. "
        "Default: a model may also have several whole nodes.",
        "--one-node",
    )
    profile: list[str] | None = shared_options.PROFILES
    scale_to_context: bool = shared_options.SCALE_TO_CONTEXT
    threads: int | None = shared_options.THREADS
    price: Path | None = option(None, shared_options.PRICE_HELP + " It adds a price to every method.")
    advice: bool = option(
        False,
        "Also plan with one more device (or node), and with a looser bound of the tightest model.",
        "--advice/--no-advice",
    )
    out: Path | None = option(None, "Write the plan to this file.", "-o")
    report: Path | None = shared_options.REPORT

    @property
    def setting(self) -> "SettingKeywords":
        """The arguments of `find_setting` for each model."""
        return {
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "memory_fraction": self.memory_fraction,
            "expert_parallel": self.expert_parallel,
            "attention_dp": self.attention_dp,
            "engine": self.engine,
            "front_end": self.front_end,
            "scale_to_context": self.scale_to_context,
        }
