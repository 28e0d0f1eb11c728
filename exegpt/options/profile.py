"""The options of `exegpt profile`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from exegpt.options import groups
from xcore.errors import InputError


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(groups.DeviceOptions, groups.PluginOptions):
    """What is measured, on which device, and where the results are written."""

    model: groups.MODEL = None
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also write the profile to this file.")] = None
    cluster_out: Annotated[
        Path | None, typer.Option(help="Write the detected cluster to this YAML file, for --cluster.")
    ] = None
    dtype: groups.RUN_DTYPE = None

    @property
    def measured_model(self) -> str:
        """The model to measure; InputError without one."""
        if self.model is None:
            raise InputError("Name a model to measure with --model, or import a profile with `exegpt profile import`.")
        return self.model
