"""What follows from a model's sizes, where no built-in one shows it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exegpt.builtin_models import builtin_config, builtin_model
from exegpt.errors import InputError
from exegpt.model import ModelSpec

SPEC = builtin_model("llama-3.1-8b")


@given(st.integers(0, 40), st.integers(0, 40), st.none() | st.integers(1, 50))
def test_what_tokens_see_is_counted_one_by_one(new, past, window):
    seen = sum(min(past + i, window or past + i) for i in range(1, new + 1))
    assert replace(SPEC, window=window).seen(new, past) == seen


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "qwen2", "sliding_window": 512}, None),
        ({"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 0}, 512),
        ({"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 2}, None),
    ],
)
def test_a_window_counts_where_all_layers_have_it(config, window):
    sizes = {key: value for key, value in builtin_config("llama-3.1-8b").items() if "sliding" not in key}
    assert ModelSpec.from_config(sizes | config, "m").window == window


def test_a_model_without_a_window_keeps_the_fingerprint_it_had_before_there_were_any():
    assert SPEC.fingerprint == "5e620ccdb8d09c52"
    assert replace(SPEC, window=4096).fingerprint != SPEC.fingerprint
    with pytest.raises(InputError, match="window = 0"):
        replace(SPEC, window=0)
