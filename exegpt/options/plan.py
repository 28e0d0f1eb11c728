"""The options of `exegpt plan`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from exegpt.options import groups


@dataclass(frozen=True, kw_only=True)
class PlanOptions(groups.PredictionOptions, groups.PluginOptions):
    """The models, the cluster and the method, and where the plan goes."""

    file: Annotated[Path, typer.Argument(help="A YAML file of models, each with its workload, rate and latency bound.")]
    cluster: Annotated[str, typer.Option("--cluster", "-c", help=groups.CLUSTER_HELP)]
    method: Annotated[
        str,
        typer.Option(
            help="exegpt (joint search of all budgets), muxserve, temporal, seallm, alpaserve, spatial, samullm "
            "(stages, for numbers of requests), or best (the best of these)."
        ),
    ] = "exegpt"
    profile: groups.PROFILES = None
    scale_to_context: groups.SCALE_TO_CONTEXT = False
    threads: groups.THREADS = None
    price: Annotated[Path | None, typer.Option(help=groups.PRICE_HELP + " It adds a price to every method.")] = None
    advice: Annotated[
        bool,
        typer.Option(
            "--advice/--no-advice",
            help="Also plan with one more device (or node), and with a looser bound of the tightest model.",
        ),
    ] = False
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan to this file.")] = None
    report: groups.REPORT = None

    @property
    def setting(self) -> dict[str, Any]:
        """The arguments of `find_setting` for each model, and the profiles by the models' names."""
        of_predictions = {field.name: getattr(self, field.name) for field in fields(groups.PredictionOptions)}
        return of_predictions | {"scale_to_context": self.scale_to_context, "profile": self.profile or ()}
