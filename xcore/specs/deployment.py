"""Deployment: an engine on a cluster."""

from dataclasses import dataclass

from xcore.specs.cluster import ClusterSpec
from xcore.specs.engine_spec import engine_of
from xcore.specs.profile import Profile


@dataclass(frozen=True)
class Deployment:
    """A cluster, whose memory an engine uses a share of, and a profile with that engine's time."""

    cluster: ClusterSpec
    profile: Profile

    @property
    def engine(self) -> str:
        """Return the name of the engine's preset."""
        return engine_of(self.profile).name
