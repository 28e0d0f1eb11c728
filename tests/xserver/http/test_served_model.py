"""What the frontend knows of a model is what the engine knows."""

import json
import shutil

import pytest

from xrunner.models import load_model
from xserver.http.served_model import ServedModel


@pytest.mark.parametrize(
    "generation", [None, {}, {"eos_token_id": None}, {"eos_token_id": 7}, {"eos_token_id": [7, 9]}]
)
def test_texts_end_by_the_engines_tokens(model, tmp_path, generation):
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    assert set(ServedModel.read(directory, None).eos) == load_model(directory).eos != set()
