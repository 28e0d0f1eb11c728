"""The options of `exegpt profile`."""

from dataclasses import dataclass
from pathlib import Path

from exegpt.options import shared_options
from exegpt.options.option_record import option
from xcore.errors import InputError


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(shared_options.DeviceOptions, shared_options.PluginOptions):
    """The measurements, their device, and the files of their results."""

    model: str | None = shared_options.MODEL
    out: Path | None = option(None, "Also write the profile to this file.", "-o")
    cluster_out: Path | None = option(None, "Write the detected cluster to this YAML file, for --cluster.")
    dtype: str | None = shared_options.RUN_DTYPE
    kv_dtype: str | None = shared_options.RUN_KV_DTYPE

    @property
    def measured_model(self) -> str:
        """The model to measure; InputError without one."""
        if self.model is None:
            raise InputError("Name a model to measure with --model, or import a profile with `exegpt profile import`.")
        return self.model
