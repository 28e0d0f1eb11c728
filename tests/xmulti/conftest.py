"""The tiny model, as the commands' tests make it, and a plan that files share."""

import pytest

from tests.exegpt.cli.conftest import exegpt, tiny, tiny_profile

__all__ = ["exegpt", "tiny", "tiny_profile"]


@pytest.fixture(scope="session")
def seallm_plan(tmp_path_factory):
    """A plan of three models, two of which share devices."""
    from tests.xmulti.sharing.test_shared_devices import BUSY, CLUSTER, IDLE, RARE, demands_of
    from xmulti.plans.planning import make_plan

    return make_plan(demands_of(tmp_path_factory.mktemp("models"), BUSY, IDLE, RARE), CLUSTER, "seallm")
