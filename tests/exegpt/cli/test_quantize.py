"""`model quantize`, and commands that take the copy."""

import pytest

from tests.exegpt.cli.test_bad_inputs import check_refused
from xprofiler.machine import computes_bf16


def quantized(exegpt, tiny, out, *options):
    return exegpt("model", "quantize", tiny, "--bits", "4", "--group-size", "32", "--out", out, "--json", *options)


def test_a_copy_is_written_planned_and_run(exegpt, tiny, tmp_path):
    done = quantized(exegpt, tiny, tmp_path / "int4")
    assert done.code == 0 and done.json["matrices"] == 14 and done.json["rounding"] == "to nearest"
    assert done.json["bytes"] < done.json["original_bytes"]
    request = '{{"id": "{}", "prompt_ids": [5, 6, 7], "max_tokens": 4, "ignore_eos": true}}\n'
    (tmp_path / "requests.jsonl").write_text("".join(map(request.format, range(3))))
    schedule = tmp_path / "schedule.json"
    where = ("--model", tmp_path / "int4", "--cluster", "local", "--profile", "roofline", "--workload", "8/4")
    tuned = exegpt("tune", "-l", "inf", *where, "--policy", "orca", "--no-advice", "--json", "--out", schedule)
    dtype = "int4" if computes_bf16() else "w4a32"  # activations in bfloat16 where the CPU computes in it
    assert tuned.code == 0 and tuned.json["schedule"]["dtype"] == dtype
    ran = exegpt(
        *("run", "--model", tmp_path / "int4", "--requests", tmp_path / "requests.jsonl", "--schedule", schedule),
        *("--profile", "roofline", "--out", tmp_path / "results.jsonl", "--json"),
    )
    assert ran.code == 0, ran.err
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--bits", "3"), "--bits 3"),
        (("--group-size", "48"), "--group-size 48"),
        (("--group-size", "128"), "does not divide"),
    ],
)
def test_what_cannot_be_quantised_is_refused_and_nothing_is_left(exegpt, tiny, tmp_path, options, message):
    check_refused(quantized(exegpt, tiny, tmp_path / "copy", *options), message)
    assert not list(tmp_path.iterdir())


def test_an_existing_directory_stays_as_it_is(exegpt, tiny, tmp_path):
    check_refused(quantized(exegpt, tiny, tmp_path), "exists already")
