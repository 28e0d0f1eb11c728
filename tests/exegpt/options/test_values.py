"""Options that name models, profiles and plug-ins."""

import pytest

from exegpt.options.values import directories, only_model, only_profile, profile_files
from xcore.errors import InputError


def test_a_model_has_one_directory():
    assert directories(["a=x", "b=y", "a=x"]) == {"a": "x", "b": "y"}
    with pytest.raises(InputError, match="--model has 'x' and 'z' for model 'a': leave one of them out"):
        directories(["a=x", "a=z"])
    with pytest.raises(InputError, match="--model x names no model"):
        directories(["x"])


def test_one_model_and_one_profile():
    assert (only_model(["m"], "run"), only_profile(["p"]), only_profile(None)) == ("m", "p", None)
    for refused in (lambda: only_model([], "run"), lambda: only_profile(["p", "q"])):
        with pytest.raises(InputError, match="pass one"):
            refused()


def test_files_of_profiles():
    assert {"a.json", "b.json", "c.json"} <= set(profile_files(["a.json", "x=b.json", "y=c.json,z=d.json"]))
    assert profile_files(None) == []
