"""What an engine says that it serves."""

from types import SimpleNamespace

import pytest

from exegpt import document
from exegpt.app.serving_engine import engine_setting
from exegpt.profile import Profile
from tests.server.conftest import schedule_for


@pytest.mark.parametrize("workload", [None, "20/10"])
def test_a_given_schedule_has_its_own_workload(tiny, tiny_profile, workload, capsys):
    """Not task S, clipped to the model's context, as the default."""
    given = schedule_for(tiny)
    options = SimpleNamespace(model=str(tiny), workload=workload, columns=None, scale_to_context=False)
    measured = SimpleNamespace(profile=document.read(Profile, tiny_profile), cluster=given.cluster)
    setting = engine_setting(options, measured, given)
    assert setting.workload.name == (workload or given.workload.name)
    (assumption,) = setting.assumptions
    assert assumption.startswith("profile: ") and assumption in capsys.readouterr().err
    assert engine_setting(options, measured, None).workload.name.startswith(workload or "S")
