"""SamuLLM's cost points as a cost table of ours."""

import json

import numpy as np
import pytest

from tests.public_data import needs_data
from xcore import document
from xcore.errors import InputError
from xcore.specs.cost_table import CostTable
from xmulti.stages.line_costs import line_costs
from xprofiler.samullm_costs import HOST, LOADING, OUTPUTS, POINTS, read_points, samullm_costs

HEAD = "model,tp,phase,num_seqs,tot_ctx_len,max_seq_len,tflops_logged,exec_s,sample_s,prep_s\n"
MACS = 1e-6
"""Tera multiply-adds per token; a tenth of a thousandth of it per position."""


def tflops(batch, length):
    return batch * length * MACS * (1 + 1e-4 * length)


@pytest.fixture
def folder(tmp_path):
    """One model at one degree; of two repeats one was held up each time."""
    rows = []
    for batch in (1, 8):
        for held, length in ((0.1, 1), (0.0, 2), (0.0, 1000), (0.1, 1001)):
            tokens = length if batch == 1 else batch * 1 + (length - 1)
            work = tflops(batch, length)
            rows.append(f"m,1,prefill,{batch},{tokens},{length},{work},{0.01 + work + held},0.001,0.002")
            work = (batch + 1e-4 * tokens) * MACS
            rows.append(f"m,1,decode,{batch},{tokens},{length},{work},{0.005 + 100 * work + held},{0.001 + held},0.002")
    (tmp_path / POINTS).write_text(HEAD + "\n".join(rows) + "\n")
    (tmp_path / LOADING).write_text(json.dumps({HOST: [{"model": "someone/m", "tp": 1, "value": 12.5}]}))
    (tmp_path / OUTPUTS).write_text("model,max_len,out_len,prob\nm,1001,5,0.25\nm,1001,1001,0.75\n")
    return tmp_path


def test_the_lesser_of_two_repeats_counts(folder):
    (model,) = samullm_costs(folder).models
    (degree,) = model.degrees
    assert (model.name, model.context, degree.tp, degree.load_s) == ("m", 1001, 1, 12.5)
    assert degree.macs_per_token == pytest.approx(1e6, rel=1e-3)
    assert degree.macs_per_position == pytest.approx(100, rel=1e-3)
    assert degree.kv_tokens == 1008
    assert model.outputs.lengths == (5, 1001)
    assert all(slope < 1e-6 and intercept == pytest.approx(0.001) for slope, intercept in degree.decode.sample)
    assert line_costs(degree).decode_s([1000] * 1) < 0.1


def test_a_table_is_written_and_read(folder, tmp_path):
    table = samullm_costs(folder)
    document.write(tmp_path / "costs.json", table)
    assert document.from_dict(CostTable, document.read_json(tmp_path / "costs.json"), "it") == table


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (POINTS, "model,tp\n", "no column"),
        (POINTS, HEAD + "m,1,prefill,1,1,1,1e-6,slow,0,0\n", "row 2, column 'exec_s': 'slow' must be a number"),
        (POINTS, HEAD + "m,1,prefill,1,1,1,1e-6,1,0,0\n", "both phases are needed"),
        (LOADING, "{}", "no list"),
        (OUTPUTS, "model\n", "no column"),
    ],
)
def test_torn_files_are_refused(folder, name, text, message):
    (folder / name).write_text(text)
    with pytest.raises(InputError, match=message):
        samullm_costs(folder)
    (folder / name).unlink()
    with pytest.raises(InputError, match="There is no"):
        samullm_costs(folder)


def test_published_points_lie_on_the_lines():
    """Of 11,868 timed iterations: the middle one of the prefill misses by well under a percent."""
    folder = needs_data("samullm")
    table, points = samullm_costs(folder), read_points(folder)
    misses = []
    for model in table.models:
        for degree in model.degrees:
            costs = line_costs(degree)
            for point in points[model.name][degree.tp]["decode"]:
                constant, per_sum, per_longest = costs.decode[point.batch]
                misses.append((constant + per_sum * point.total + per_longest * point.longest) / sum(point.seconds) - 1)
    assert np.median(np.abs(misses)) < 0.02
    assert np.mean(np.abs(misses)) < 0.06, "with those that were held up by 0.1 s"
    vicuna = table.model("vicuna-13b-v1.5").degree(1)
    assert vicuna.macs_per_position == pytest.approx(2 * 40 * 5120, rel=1e-3)
    assert vicuna.macs_per_token == pytest.approx(40 * 317194240, rel=1e-3)
    assert vicuna.load_s == pytest.approx(29.98, abs=0.01)
