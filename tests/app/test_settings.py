"""Lengths that a model's context doesn't hold."""

import pytest

from exegpt.app.settings import fit_context
from exegpt.builtin_models import builtin_model
from exegpt.errors import InputError
from exegpt.workload import Workload


def test_fixed_lengths_up_to_the_context_stand_as_they_are():
    opt = builtin_model("opt-13b")
    assert fit_context(Workload.fixed(1536, 512), opt) == (Workload.fixed(1536, 512), [])
    with pytest.raises(InputError, match="2,049 tokens"):
        fit_context(Workload.fixed(1537, 512), opt)
    assert fit_context(Workload.fixed(9000, 512), builtin_model("t5-11b"))[0].input.mean == 9000
