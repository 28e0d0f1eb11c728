"""`--kv-dtype int8`: planned, simulated and run alike, with a profile of its own, and refused where it can't run."""

import pytest

from tests.exegpt.cli.test_bad_inputs import check_refused
from tests.stored_profile import store_profile
from xcore.specs.model import ModelSpec
from xprofiler import store
from xprofiler.profiles import find_profile
from xrunner.models.device import CPU
from xscheduler.settings import find_setting

REQUEST = '{{"id": "{}", "prompt_ids": [5, 6, 7], "max_tokens": 4, "ignore_eos": true}}\n'


@pytest.fixture
def files(tmp_path):
    (tmp_path / "requests.jsonl").write_text("".join(map(REQUEST.format, range(3))))
    return tmp_path


def test_it_is_planned_simulated_and_run(exegpt, tiny, files):
    where = ("--model", tiny, "--cluster", "local", "--profile", "roofline", "--workload", "8/4", "--json")
    how = ("--policy", "orca", "--no-advice", "--kv-dtype", "int8", "--out", files / "schedule.json")
    tuned = exegpt("tune", "-l", "inf", *where, *how)
    assert tuned.code == 0 and tuned.json["schedule"]["kv_dtype"] == "int8", tuned.err
    ran = exegpt(
        *("run", "--model", tiny, "--requests", files / "requests.jsonl", "--schedule", files / "schedule.json"),
        *("--profile", "roofline", "--out", files / "results.jsonl", "--json"),
    )
    assert ran.code == 0 and len((files / "results.jsonl").read_text().splitlines()) == 3, ran.err
    spec, blocks = ModelSpec.from_directory(tiny), {}
    for kv_dtype in ("int8", "fp32"):
        done = exegpt("simulate", *where, "--max-num-seqs", "4", "--kv-dtype", kv_dtype)
        blocks[kv_dtype] = done.json["kv_blocks"] * spec.kv_bytes(1, kv_dtype)
    assert blocks["int8"] == pytest.approx(blocks["fp32"], rel=1e-6)  # the same memory, in blocks of other sizes


def test_a_profile_is_for_one_kv_dtype(monkeypatch, tmp_path, tiny):
    monkeypatch.setenv("EXEGPT_CACHE", str(tmp_path))
    store_profile(tiny)
    spec = ModelSpec.from_directory(tiny)
    plain = store.find_here(spec, "fp32", CPU)
    assert plain.kv_dtype == "fp32" and store.find_here(spec, "fp32", CPU, kv_dtype="int8") is None
    store_profile(tiny, kv_dtype="int8")
    for kv_dtype in ("fp32", "int8"):
        setting = find_setting(str(tiny), "local", "8/4", kv_dtype=kv_dtype)
        assert setting.profile.source == "measured" and setting.kv_dtype == setting.profile.kv_dtype == kv_dtype
    small, _ = find_profile(None, spec, setting.cluster, "fp32", kv_dtype="int8")
    assert small.fingerprint != plain.fingerprint and store.find_here(spec, "fp32", CPU) == plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--kv-dtype", "fp8"), "can't be in fp8 in a run in fp32: use fp32, or int8 on a CPU"),
        (("--kv-dtype", "int4"), "--kv-dtype 'int4' is not known"),
    ],
)
def test_other_dtypes_are_refused(exegpt, tiny, files, options, message):
    check_refused(exegpt("run", "--model", tiny, "--requests", files / "requests.jsonl", *options), message)


def test_a_schedule_determines_it(exegpt, tiny, tiny_schedule, files):
    asked = ("--requests", files / "requests.jsonl", "--schedule", tiny_schedule, "--kv-dtype", "int8")
    check_refused(exegpt("run", "--model", tiny, *asked), "has keys and values in fp32, and --kv-dtype asks for int8")
