"""KernelImport: the import of measured kernels that could replace a data sheet, and the errors of both."""

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

from xcore.errors import InputError
from xcore.specs.cluster import ClusterSpec, is_stock
from xcore.specs.model import ModelSpec, usual_kv_dtype
from xcore.specs.profile import Profile
from xprofiler.kernel_tables import KernelTables, tables_for
from xprofiler.roofline_errors import COMPARED, SOURCES, RooflineErrors

INSTALL = "pip install 'exegpt[gpu-data]'"


@dataclass(frozen=True)
class KernelImport:
    """Kernels measured on a cluster's device, at the tensor-parallel degrees that they and the data sheet have."""

    engine: str
    device: str
    degrees: tuple[int, ...]
    compared: tuple[RooflineErrors, ...]
    """The errors of both at these degrees; empty where none were compared."""
    command: str
    """The command that makes the profile."""
    options: str
    """The options that use the profile."""

    @property
    def better_at(self) -> tuple[int, ...]:
        """Return the degrees at which imported kernels had the smaller error."""
        return tuple(row.tp for row in self.compared if row.imported_error < row.median_error)

    def to_dict(self) -> dict[str, object]:
        """Return what `--json` prints."""
        compared = [asdict(row) for row in self.compared]
        facts = {name: value for name, value in asdict(self).items() if name != "compared"}
        source = SOURCES[self.engine] if compared else None
        return {**facts, "install": INSTALL, "better_at": self.better_at, "compared": compared, "compared_with": source}

    @property
    def text(self) -> str:
        """Return the sentence that is printed."""
        take = f"`{INSTALL}`, then `{self.command}`, and `{self.options}`"
        if not self.compared:
            return (
                f"import: kernels were measured on {self.device} at {_at(self.degrees)}, but neither they nor the "
                f"data sheet were compared with servers of engine {self.engine} there; to use them, run {take}"
            )
        first = self.compared[0]
        errors = ", ".join(
            f"{row.imported_error:.1%} at TP{row.tp} (data sheet {row.median_error:.1%}, {row.rows} rows)"
            for row in self.compared
        )
        over = f"medians over {SOURCES[self.engine]}, {first.load}"
        off = f"{first.quantity} under engine {self.engine} was off by {errors}: {over}"
        if not self.better_at:
            return f"import: kernels measured on {self.device} were no better than its data sheet: {off}"
        better = f"better than its data sheet at {_at(self.better_at)}"
        return f"import: kernels measured on {self.device} were {better}: {off}; to use them, run {take}"


def kernel_import(
    profile: Profile, model: ModelSpec, cluster: ClusterSpec, kv_dtype: str, typed: str | None = None, name: str = ""
) -> KernelImport | None:
    """Return the import for a prediction from a data sheet; None for other profiles, or if no tables cover it.

    Args:
        profile: The profile of the prediction.
        model: The model's spec.
        cluster: Its links must be built-in ones: measured links hold for those alone.
        kv_dtype: The dtype of keys and values.
        typed: The model as the user typed it; None if that is not known.
        name: The model's name in a file of several models.
    """
    if profile.source != "roofline" or not is_stock(cluster):
        return None
    engine = profile.provenance["engine"]
    tables = tables_for(cluster.device.kind, engine)
    if tables is None or not tables.cover(model, profile.dtype, kv_dtype):
        return None
    degrees = tuple(degree.tp for degree in profile.degrees if degree.tp in KernelTables.DEGREES)
    compared = tuple(
        row for row in COMPARED if (row.engine, row.device) == (engine, tables.device) and row.tp in degrees
    )
    file = shlex.quote(f"{model.name}_{tables.system}.json")
    command = (
        f"exegpt profile import aiconfigurator --system {tables.system} --engine {tables.kernels} "
        f"--model {shlex.quote(typed or _builtin(model))} --dtype {profile.dtype}"
        + (f" --kv-dtype {kv_dtype}" if kv_dtype != usual_kv_dtype(profile.dtype) else "")
        + f" --out {file}"
    )
    named = shlex.quote(f"{name}=") if name else ""
    return KernelImport(engine, tables.device, degrees, compared, command, f"--profile {named}{file} --engine {engine}")


def _builtin(model: ModelSpec) -> str:
    """Return a built-in model's name, or `DIR`, which stands for the directory of another model."""
    from xcore.specs.builtin_models import builtin_model

    try:
        known = builtin_model(model.name) == model and not Path(model.name).is_dir()
    except InputError:
        known = False
    return model.name if known else "DIR"


def _at(degrees: tuple[int, ...]) -> str:
    return ", ".join(f"TP{tp}" for tp in degrees)
