"""`exegpt run` under mpirun: one file of results, and what it prints where ranks or files don't fit."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from exegpt.cli import main
from tests.xrunner.cells import requests, schedule
from xcore import document
from xcore.errors import InputError
from xcore.specs.model import ModelSpec
from xrunner.core.engine import Engine
from xrunner.core.job_setup import check_ranks
from xrunner.models import load_model
from xrunner.models.device import CPU, free_memory


@pytest.fixture(scope="module")
def llama(directories):
    return directories["llama"]


@pytest.fixture(scope="module")
def reference(llama):
    """The tokens of one rank alone."""
    model = load_model(llama)
    return {r.id: list(r.output_ids) for r in Engine(model, schedule(model.spec)).run(requests()).results}


@pytest.fixture
def arguments_of(llama, tmp_path):
    """The arguments of a run, by the policy and layout of its schedule; files lie in the test's folder."""

    def write(policy="rra", degrees=(1, 1), **variables):
        plan = schedule(ModelSpec.from_directory(llama), policy, degrees, **variables)
        document.write(tmp_path / "schedule.json", plan)
        lines = [{"id": r.id, "prompt_ids": list(r.prompt_ids), "max_tokens": r.max_tokens} for r in requests()]
        text = "".join(json.dumps(line | {"ignore_eos": True}) + "\n" for line in lines)
        (tmp_path / "requests.jsonl").write_text(text)
        files = ["--schedule", tmp_path / "schedule.json", "--requests", tmp_path / "requests.jsonl"]
        return ["run", "--model", llama, *files, "--profile", "roofline", "--out", tmp_path / "out.jsonl"]

    return write


def sentence(text):
    """The one sentence that the command prints."""
    (printed,) = [line for line in text.splitlines() if line.startswith("exegpt: ")]
    assert "Traceback" not in text
    return re.sub(r"\s+", " ", printed)


def outputs(path):
    return {r["id"]: r["output_ids"] for r in map(json.loads, path.read_text().splitlines())}


@pytest.mark.slow
def test_two_ranks_write_one_file_and_report_what_was_predicted(job, arguments_of, reference, tmp_path):
    done = job(2, "-m", "exegpt", *arguments_of(), "--json")
    assert done.returncode == 0, done.stderr
    assert outputs(tmp_path / "out.jsonl") == reference
    assert not (tmp_path / "out.jsonl.partial").exists()
    answer = json.loads(done.stdout)
    assert (
        answer["requests"] == len(reference) and answer["throughput_tok_s"] > 0 and answer["predicted"]["latency_s"] > 0
    )
    assert len(answer["utilisation"]) == 2 and all(0 < share <= 1 for share in answer["utilisation"])


@pytest.mark.slow
def test_line_5_ranks_without_a_schedule_measure_themselves_tune_agree_and_run(job, arguments_of, reference, tmp_path):
    """The second job plans with what the first one measured, and finds the same schedule."""
    arguments_of()
    few = Path(__file__).parents[2] / "xprofiler" / "small.py"  # `exegpt` with few points
    model, written = arguments_of()[2], tmp_path / "requests.jsonl"
    run = [few, "run", "--model", model, "--requests", written, "--policy", "rra", "--out", tmp_path / "out.jsonl"]
    cache = {"EXEGPT_CACHE": str(tmp_path / "cache")}
    done = job(2, *run, "--json", **cache)
    assert done.returncode == 0, done.stderr
    assert outputs(tmp_path / "out.jsonl") == reference
    answer = json.loads(done.stdout)
    plan = answer["schedule"]
    assert plan["policy"] == "rra" and plan["replicas"] * sum(s["tp"] for s in plan["stages"]) == 2
    assert answer["provenance"]["profile"]["source"] == "measured"
    again = json.loads(job(2, *run[:-1], tmp_path / "again.jsonl", "--json", **cache).stdout)
    assert again["schedule"] == plan
    none = job(2, *run, "--latency-bound", "0.001ms", "--json", **cache)
    assert none.returncode == 3 and json.loads(none.stdout)["schedule"] is None and "Traceback" not in none.stderr
    assert "lowest reachable latency" in none.stderr
    refused = job(2, *run, "--no-profile", **cache)
    assert refused.returncode == 2 and "measure their own profile: leave --no-profile out" in sentence(refused.stderr)


def test_a_schedule_of_several_devices_is_refused_with_its_mpirun_command(arguments_of, capsys, tmp_path):
    assert main([str(a) for a in arguments_of("orca", (2, 1))]) == 2
    stderr = capsys.readouterr().err
    assert "for 3 devices" in sentence(stderr) and "mpirun -n 3 exegpt run" in sentence(stderr)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(("per_node", "placed"), [(2, ""), (3, "--map-by ppr:2:node "), (5, "--map-by ppr:4:node ")])
def test_devices_that_are_left_over_in_every_node_get_no_rank(per_node, placed):
    cluster = SimpleNamespace(nodes=2, devices_per_node=per_node)
    stages, replicas = [SimpleNamespace(devices=(0, 1))], 2 * (per_node // 2)
    with pytest.raises(InputError) as refused:
        check_ranks(SimpleNamespace(cluster=cluster, stages=stages, replicas=replicas), 1)
    asked = str(refused.value)
    assert f"start mpirun -n {2 * replicas} {placed}exegpt run." in asked


@pytest.mark.slow
def test_ranks_with_different_command_lines_are_refused(start_each, arguments_of, tmp_path):
    arguments_of("orca")
    other = [str(a).replace("schedule.json", "other.json") for a in arguments_of()]
    done = start_each(["-m", "exegpt", *arguments_of()], ["-m", "exegpt", *other])
    assert done.returncode == 2
    assert "Rank 1 (" in done.stderr and "other.json' and rank 0 has '" in done.stderr
    assert sentence(done.stderr).endswith("start all ranks with the same arguments.")


EITHER = [1, pytest.param(0, marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize("rank", EITHER)
def test_a_rank_of_another_version_is_refused(job, arguments_of, rank):
    done = job(2, "-m", "tests.xrunner.broken", *arguments_of(), FAULT=f"{rank}:version")
    assert done.returncode == 2
    assert re.search(
        "Rank 1 .* has exegpt '.*' and rank 0 has '.*': start all ranks with the same", sentence(done.stderr)
    )


EXITS = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from exegpt.cli import main
try:
    code = main(sys.argv[2:])
except SystemExit as end:
    code = end.code
Path(sys.argv[1], os.environ["OMPI_COMM_WORLD_RANK"]).write_text(str(code))
"""
"""Writes the command's exit code into a file named after the rank."""


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["run", "-m", "m", "-r", "r", "--seed", "x"], "Invalid value for '--seed': "),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (["run", "-m", "m", "-r", "r", "-l", "abc"], "'abc' is not a duration: "),
                (["run", "-m", "m", "-r", "r", "--policy", "nonsense"], "Policy 'nonsense' is not known: "),
                (["run", "-m", "m", "-r", "r", "--dtype="], "'--dtype=' is empty: "),
                (["profile"], "Name a model to measure with --model"),
            )
        ),
    ],
)
def test_a_malformed_option_is_printed_once_and_all_ranks_exit_with_2(job, tmp_path, command, expected):
    done = job(2, "-c", EXITS, tmp_path, *command)
    assert sentence(done.stderr).startswith(f"exegpt: {expected}")
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2", "2"]


def test_a_malformed_option_on_one_rank_names_the_rank(start_each, arguments_of):
    command = ["-m", "exegpt", *arguments_of()]
    done = start_each([*command, "--seed", "1"], [*command, "--seed", "x"])
    assert done.returncode == 2
    assert re.search(r"On rank 1 \(.*\): Invalid value for '--seed'", sentence(done.stderr))


@pytest.mark.slow
def test_tables_under_mpirun_are_plain_text(job, arguments_of):
    done = job(2, "-m", "exegpt", *arguments_of("rra"))
    assert done.returncode == 0, done.stderr
    assert "predicted" in done.stdout and "\x1b" not in done.stdout


@pytest.mark.slow
def test_as_many_ranks_as_devices(job, arguments_of, tmp_path):
    done = job(2, "-m", "exegpt", *arguments_of("rra", (1, 1), replicas=2))
    assert done.returncode == 2
    assert "for 4 devices (2 x 2), and 2 ranks were started: start mpirun -n 4" in sentence(done.stderr)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.slow
def test_a_job_without_a_schedule_is_refused(job, arguments_of):
    arguments = [str(a) for a in arguments_of()]
    place = arguments.index("--schedule")
    done = job(2, "-m", "exegpt", *arguments[:place], *arguments[place + 2 :])
    assert done.returncode == 2 and "pass --schedule" in sentence(done.stderr)


@pytest.mark.slow
def test_a_torn_file_or_a_missing_tensor_is_found_by_the_rank_that_reads_it(job, arguments_of, llama, tmp_path):
    from safetensors.torch import load_file, save_file

    model = tmp_path / "torn"
    shutil.copytree(llama, model)
    (last,) = model.glob("model-00002-*")
    last.write_bytes(last.read_bytes()[:-1000])
    arguments = [model if a == llama else a for a in arguments_of()]
    done = job(2, "-m", "exegpt", *arguments)
    assert done.returncode == 2
    assert re.search(r"On rank \d \(.*model-00002.*not a whole safetensors file", sentence(done.stderr))
    shutil.copy(llama / last.name, last)
    index = json.loads((model / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.layers.4.mlp.up_proj.weight"]
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = load_file(last)
    del tensors["model.layers.4.mlp.up_proj.weight"]
    save_file(tensors, last, metadata={"format": "pt"})
    done = job(2, "-m", "exegpt", *arguments)
    assert done.returncode == 2
    assert re.search(r"On rank 1 \(.*lack the tensor 'model.layers.4.mlp.up_proj.weight'", sentence(done.stderr))
    assert not list(tmp_path.glob("out*"))


@pytest.mark.slow
def test_caches_that_only_together_exceed_the_memory_are_refused(job, arguments_of, llama, tmp_path):
    spec = ModelSpec.from_directory(llama)
    each = 16 * 3 * spec.kv_bytes(1, "fp32")
    done = job(2, "-m", "exegpt", *arguments_of(kv_blocks=int(0.8 * free_memory(CPU) / each)))
    assert done.returncode == 2
    assert re.search(r"A KV cache of \d+ blocks on each rank needs .* GiB, and .* are available", sentence(done.stderr))
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("rank", EITHER)
def test_too_little_memory_for_buffers_is_refused_before_any_work(job, arguments_of, tmp_path, rank):
    done = job(2, "-m", "tests.xrunner.broken", *arguments_of(), FAULT=f"{rank}:memory")
    assert done.returncode == 2
    assert re.search(rf"rank {rank} \(.*A buffer for \d+ tokens on each rank", sentence(done.stderr))
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("rank", EITHER)
def test_an_exception_in_one_rank_ends_the_job_and_names_it(job, arguments_of, rank):
    done = job(2, "-m", "tests.xrunner.broken", *arguments_of(), FAULT=f"{rank}:midst", timeout=60)
    assert done.returncode == 1
    assert f"exegpt: rank {rank} (" in done.stderr and "broken in the midst" in done.stderr


@pytest.mark.slow
def test_two_ranks_are_benched(job, arguments_of, tmp_path):
    arguments_of("rra", (1, 1))
    files = ["--schedule", tmp_path / "schedule.json", "--requests", tmp_path / "requests.jsonl"]
    model = arguments_of()[2]
    done = job(
        2, "-m", "exegpt", "bench", "--model", model, *files, "--profile", "roofline", "--repeats", "1", "--json"
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["policies"]
    assert row["policy"] == "rra" and row["requests"] == len(requests())
    assert row["throughput_tok_s"] > 0 and row["predicted"]["throughput_tok_s"] > 0
    assert len(row["utilisation"]) == 2
