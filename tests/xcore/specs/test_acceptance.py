"""Acceptance from rates and from files, and the measured acceptance lengths of InferenceX."""

from pathlib import Path

import pytest
import yaml

from tests.public_data import DATA
from xcore.errors import InputError
from xcore.specs.acceptance import Acceptance
from xcore.specs.speculation import Speculation

GOLDEN = sorted((DATA / "measured/inferencex/golden_al").glob("*.yaml"))


def test_rates_are_read():
    assert Acceptance.parse("0.5").at(3) == (0.5, 0.25, 0.125)
    by_position = Acceptance.parse("0.8,0.6,0.5")
    assert by_position.at(2) == (0.8, 0.6) and by_position.longest == 3


@pytest.mark.skipif(not GOLDEN, reason="measured/inferencex/golden_al is absent")
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_measured_acceptance_lengths_are_the_mean_tokens_per_step(path):
    """Within 1 %, by outputs of 4,096 tokens as in the measurement, of which the prefill gives the first."""
    for curves in yaml.safe_load(path.read_text()).values():
        for name, curve in curves.items():
            acceptance = Acceptance.parse(f"{path}:{name}")
            for drafted, mean in curve.items():
                speculation = Speculation(acceptance.at(drafted))
                assert speculation.tokens_per_step == pytest.approx(mean, rel=1e-9)
                assert 4095 / float(speculation.iterations(4095)[0]) == pytest.approx(mean, rel=0.01)


def test_a_curve_may_lack_lengths_and_needs_a_name_among_several(tmp_path):
    file = Path(tmp_path) / "curves.yaml"
    file.write_text("model:\n  hot: {1: 1.8, 3: 2.6}\n  cold: {2: 2.0}\n")
    known = Acceptance.parse(f"{file}:hot")
    assert list(known.by_length) == [1, 3] and 1 + sum(known.at(3)) == pytest.approx(2.6)
    for text, why in (
        (str(file), "2 curves"),
        (f"{file}:none", "0 curves"),
        ("1.5", "from 0 to 1"),
        ("0.5,0.6", "fall"),
        (f"{tmp_path}/no.yaml", "no acceptance file"),
    ):
        with pytest.raises(InputError, match=why):
            Acceptance.parse(text)
    with pytest.raises(InputError, match="says nothing about 2 draft tokens: it has 1, 3"):
        known.at(2)
    file.write_text("{2: 3.5}")
    with pytest.raises(InputError, match="1 to 3 tokens"):
        Acceptance.parse(str(file))
