"""Demands: the requirements of each model of a models file on a cluster."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from xcore.duration import parse_duration
from xcore.errors import InputError
from xcore.specs.cluster import ClusterSpec, parse_cluster
from xcore.specs.workload import Workload
from xcore.traces.trace import parse_rate
from xmulti.applications.expected_calls import expected_calls
from xmulti.files.models_file import profiles_by_model, read_models, workload_beside
from xscheduler.settings import Setting, find_setting

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from xscheduler.settings import SettingKeywords


@dataclass(frozen=True)
class ModelDemand:
    """One model's requirements, on the whole cluster."""

    name: str
    setting: Setting
    rate_seq_s: float | None
    requests: int | None
    bound_s: float | None
    directory: str | None = None
    """Directory of the model's weights, if the model was named by it."""
    one_node: bool = False
    """Whether all its devices must be of one node."""

    def sizes(self, cluster: ClusterSpec) -> list[int]:
        """Return the possible numbers of its devices: of one node, or of whole nodes."""
        from xmulti.sharing.budgets import counts

        return counts(1 if self.one_node else cluster.nodes, cluster.devices_per_node)

    def within(self, bound_s: float | None) -> "ModelDemand":
        """Return the same demand under another bound in seconds."""
        return replace(self, bound_s=bound_s)

    @property
    def alike(self) -> tuple[object, ...]:
        """A key that is equal for models with the same performance on equal numbers of devices."""
        setting = self.setting
        profile = setting.profile
        times = profile.source if profile.source == "roofline" else profile.fingerprint
        return setting.model, setting.workload, times, profile.dtype, setting.kv_dtype, self.requests, self.bound_s

    @property
    def work(self) -> float:
        """Tokens times parameters, per second or in total: the basis of a proportional share."""
        lengths = self.setting.workload
        tokens = lengths.input.mean + lengths.output.mean
        return (self.rate_seq_s or self.requests or 0) * tokens * self.setting.model.parameters


def read_demands(
    path: Path,
    cluster: str,
    *,
    profile: Sequence[str] = (),
    one_node: bool = False,
    **options: "Unpack[SettingKeywords]",
) -> tuple[ModelDemand, ...]:
    """Read a models file's demands on a cluster.

    `profile` as in `profiles_by_model`, `one_node` as in `ModelDemand`, `options` as in `find_setting`.

    Raises:
        InputError: The file can't be read, or has an unknown name.
    """
    if cluster != "local":
        parse_cluster(cluster, options.get("memory_fraction"))  # so that an error in it names no model
    file = read_models(path)
    expected = expected_calls(path, file)
    lengths = expected.lengths() if expected else {}
    file.check(lengths)
    profiles = profiles_by_model(profile, [entry.name for entry in file.models], path)
    demands = []
    for entry in file.models:
        calls = lengths.get(entry.name)
        workload: str | Workload = workload_beside(entry.workload or "", path.parent)
        if calls:
            workload = Workload.from_requests(f"calls of {file.applications}", calls)
        try:
            where = (entry.model, cluster, workload, profiles.get(entry.name))
            setting = find_setting(*where, columns=entry.columns, one_engine=True, name=entry.name, **options)
            rate = parse_rate(entry.rate) if entry.rate is not None else None
            bound_s = parse_duration(entry.latency_bound) if entry.latency_bound is not None else None
        except InputError as error:
            raise InputError(f"Model '{entry.name}' of '{path}': {error}") from None
        directory = str(Path(entry.model).resolve()) if Path(entry.model).is_dir() else None
        requests = len(calls) if calls else entry.requests
        demands.append(ModelDemand(entry.name, setting, rate, requests, bound_s, directory, one_node))
    return tuple(demands)
