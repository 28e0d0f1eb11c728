"""MuxServe's cost tables: read, cleaned of outliers, refused where they are something else."""

import json

import pytest

from tests.public_data import needs_data
from xcore import document
from xcore.errors import InputError
from xcore.specs.iteration_profile import IterationProfile
from xprofiler.muxserve_tables import muxserve_profiles


def cell(prefill, decoding):
    return {"prefill": prefill, "decoding": decoding}


TABLE = {
    "small": {
        "1": {
            "30": {"1": {"32": cell(20, 12), "64": cell(40, 13)}, "2": {"32": cell(44, 12), "64": cell(80, 14)}},
            "100": {"1": {"32": cell(10, 11), "64": cell(99, 15)}, "2": {"32": cell(19, 12), "64": cell(-1, 13)}},
        }
    }
}


def write(path, table):
    file = path / "cost.json"
    file.write_text(json.dumps(table))
    return file


def test_no_cell_costs_more_than_one_with_more_work_on_less(tmp_path):
    profile = muxserve_profiles(write(tmp_path, TABLE))["small"]
    some, all_of_it = profile.of(1)
    assert (some.share, all_of_it.share) == (0.3, 1.0)
    assert all_of_it.prefill.values == pytest.approx((0.010, 0.040, 0.019, 0.080))  # 99 and what didn't fit are 30 %'s
    assert all_of_it.decode.values == pytest.approx((0.011, 0.013, 0.012, 0.013))
    assert some.decode.values == pytest.approx((0.012, 0.013, 0.012, 0.014))
    assert profile.degrees == (1,)


def test_a_profile_round_trips(tmp_path):
    profile = muxserve_profiles(write(tmp_path, TABLE))["small"]
    document.write(tmp_path / "profile.json", profile)
    assert document.read(IterationProfile, tmp_path / "profile.json") == profile


@pytest.mark.parametrize("table", [[], {"m": 3}, {"m": {"one": {}}}, {"m": {"1": {"30": {"1": {"32": cell(-1, -1)}}}}}])
def test_what_is_no_such_table_is_refused(table, tmp_path):
    with pytest.raises(InputError, match="is not a cost table of MuxServe"):
        muxserve_profiles(write(tmp_path, table))


def test_a_degree_that_wasnt_measured_is_refused(tmp_path):
    with pytest.raises(InputError, match="on 2 devices: use one of 1"):
        muxserve_profiles(write(tmp_path, TABLE))["small"].of(2)


def test_published_tables_are_monotone():
    profiles = muxserve_profiles(needs_data("muxserve", "llama_a100_cost.json"))
    assert set(profiles) == {"llama-7b", "llama-13b", "llama-30b", "llama-65b"}
    for profile in profiles.values():
        for tables in profile.tables:
            for table in (tables.prefill, tables.decode):
                values = [[table.at(b, n) for n in table.points[1]] for b in table.points[0]]
                assert all(row == sorted(row) for row in values)
                assert all(list(column) == sorted(column) for column in zip(*values, strict=True))
    outlier = next(t for t in profiles["llama-30b"].of(2) if t.share == 1.0).decode
    assert outlier.at(32, 128) < 0.036  # 108.8 ms as published, 35.2 on nine tenths
