"""A job of two ranks under mpirun: one profile for all degrees, one cluster, and how it fails and goes on."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from exegpt.cli import main
from tests.mpi import MPIRUN, launcher_environment
from xcore.document import read
from xcore.errors import InputError
from xcore.specs.cluster import parse_cluster
from xcore.specs.model import ModelSpec
from xcore.specs.profile import Profile
from xprofiler.job import ProfilingJob
from xrunner.comm import ranks
from xrunner.models.create import create_model

ROOT = Path(__file__).parents[2]
SMALL = Path(__file__).parent / "small.py"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models that differ in size."""
    root = tmp_path_factory.mktemp("models")
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "vocab": 300, "context": 48}
    create_model(root / "tiny", "llama", ffn=128, **sizes)
    create_model(root / "other", "llama", ffn=96, **sizes)
    return root


@pytest.fixture
def job(tmp_path):
    """Runs Python as the two ranks of a job, with the same arguments or with a list for each."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install -e '.[mpi]'")
    if not MPIRUN:
        pytest.skip("there is no mpirun: pip install -e '.[mpi]'")

    def run(*arguments, **environment):
        variables = {"EXEGPT_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"} | environment
        variables |= launcher_environment(tempfile.mkdtemp(dir=tmp_path))
        programs = [["-n", "1", sys.executable, *map(str, command)] for command in (arguments[0], arguments[-1])]
        line = [MPIRUN, *programs[0], ":", *programs[1]]
        return subprocess.run(line, capture_output=True, text=True, timeout=100, cwd=ROOT, env=os.environ | variables)

    return run


def profile(model, *more):
    return [SMALL, *whole_profile(model, *more)[2:]]


def whole_profile(model, *more):
    """With all points: for what is refused before any is measured."""
    return ["-m", "exegpt", "profile", "--model", model, *more]


@pytest.mark.slow
def test_one_file_holds_every_degree_and_the_cluster_it_was_measured_on(job, models, tmp_path):
    """After an exception in one rank, which ends the job with its name, everything measured so far stands."""
    out, yaml = tmp_path / "profile.json", tmp_path / "cluster.yaml"
    command = profile(models / "tiny", "--out", out, "--cluster-out", yaml, "--json")
    broken = job(command, FAIL="1:chunk_attention tp=2")
    assert broken.returncode == 1
    assert "exegpt: rank 1 (" in broken.stderr and "broken at chunk_attention tp=2" in broken.stderr
    (partial,) = (tmp_path / "cache" / "profiles").iterdir()
    rows = [json.loads(line) for line in partial.read_text().splitlines()]
    assert {row["table"] for row in rows} >= {"chunk_attention", "rest tp=2"} and not out.exists()
    assert all(row["table"] != "chunk_attention tp=2" for row in rows)
    rows = [row | {"seconds": 1.0} if row["table"] == "host_copy" else row for row in rows]  # none is measured again
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))

    done = job(command)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["out"] == str(out)  # one rank prints
    (stored,) = (tmp_path / "cache" / "profiles").iterdir()
    measured = read(Profile, out)
    assert read(ProfilingJob, stored).profile == measured
    assert [tables.tp for tables in measured.degrees] == [1, 2]
    assert measured.model == ModelSpec.from_directory(models / "tiny").fingerprint
    for tables in measured.degrees:
        layer = tables.decoder
        for table in (layer.rest, layer.encode_attention, layer.chunk_attention, layer.decode_attention, measured.send):
            assert min(table.values) > 0 and len(table.spread) == len(table.values)
    assert (
        measured.send_between_nodes == measured.send
        and "send between ranks 0 and 1, used for the other kind too" in measured.provenance["links"]
    )
    assert float(measured.provenance["host_copy_bytes_s"]) == pytest.approx(2**26, rel=1e-3)

    cluster = parse_cluster(str(yaml))
    assert (cluster.nodes, cluster.devices_per_node, cluster.is_cpu) == (1, 2, True)
    assert cluster.device.flops_s["fp32"] > 0 and cluster.intra.bandwidth_bytes_s > 0 and cluster.inter.latency_s > 0
    schedule = tmp_path / "schedule.json"
    tuned = ["tune", "-l", "inf", "-m", models / "tiny", "-c", yaml, "-p", out, "-w", "9/5", "--policy", "rra"]
    assert main([*map(str, tuned), "--out", str(schedule)]) == 0
    measured = json.loads(schedule.read_text())
    assert measured["replicas"] * sum(len(stage["devices"]) for stage in measured["stages"]) == 2


@pytest.mark.slow
def test_ranks_with_a_node_each_measure_the_link_between_nodes(job, models, tmp_path):
    out, yaml = tmp_path / "profile.json", tmp_path / "cluster.yaml"
    done = job(profile(models / "tiny", "--out", out, "--cluster-out", yaml), ALONE="1")
    assert done.returncode == 0, done.stderr
    measured = read(Profile, out)
    assert [tables.tp for tables in measured.degrees] == [1]
    assert measured.provenance["ranks"] == "2 nodes x 1" and min(measured.send_between_nodes.values) > 0
    cluster = parse_cluster(str(yaml))
    assert (cluster.nodes, cluster.devices_per_node) == (2, 1)


@pytest.mark.slow
def test_ranks_with_devices_of_their_own_send_directly(job, models, tmp_path):
    out = tmp_path / "profile.json"
    done = job(profile(models / "tiny", "--out", out), DIRECT="1")
    assert done.returncode == 0, done.stderr
    measured = read(Profile, out)
    assert measured.provenance["transport"] == "NCCL between GPUs" and min(measured.send.values) > 0
    assert [tables.tp for tables in measured.degrees] == [1, 2]


def test_ranks_with_different_models_end_alike_before_any_work(job, models, tmp_path):
    done = job(whole_profile(models / "tiny"), whole_profile(models / "other"))
    assert done.returncode == 2, done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("exegpt: ")]
    assert (
        "has model 'other (" in sentence
        and "and rank 0 has 'tiny (" in sentence
        and "start all ranks with the same" in sentence
    )
    assert "Traceback" not in done.stderr and not (tmp_path / "cache").exists()


DISAGREE = """
import sys
from xcore.errors import InputError
from xrunner.comm.ranks import job

def facts():
    if sys.argv[1] == "trouble" and ranks.rank == 1:
        raise InputError("There is no model directory 'tiny'.")
    return {"dtype": "fp32", "exegpt": f"0.{ranks.rank}"}

try:
    with job() as ranks:
        ranks.agree(facts)
except InputError as error:
    print(error)
    sys.exit(2)
"""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("version", "has exegpt '0.1' and rank 0 has '0.0': start all ranks with the same arguments."),
        ("trouble", "There is no model directory 'tiny'."),
    ],
)
def test_an_error_on_one_rank_is_printed_once_with_its_number(job, what, words):
    done = job(["-c", DISAGREE, what])
    assert done.returncode == 2, done.stderr
    (sentence,) = done.stdout.splitlines()
    assert "ank 1 (" in sentence and sentence.endswith(words)


SHARDED = """
import sys, time, torch
from xrunner.models import Shard, load_model
from tests.xrunner.models.test_decoder import IDS, logits
from xprofiler.links import HostLinks
from xrunner.comm.ranks import job
with job() as ranks:
    whole, reduce = logits(load_model(sys.argv[1]), IDS[:40]), HostLinks(ranks).all_reduce(2)
    for dtype, close in (("fp32", 1e-4), ("bf16", 0.3)):
        mine = logits(load_model(sys.argv[1], dtype, shard=Shard(ranks.local, 2, reduce)), IDS[:40])
        torch.testing.assert_close(mine.float(), whole, atol=close, rtol=close)
    assert len(ranks.all(None)) == ranks.size == 2
    before = time.process_time()
    if ranks.rank == 0:
        time.sleep(0.5)
    ranks.all(None)
    assert time.process_time() - before < 0.25  # who waits leaves the CPU to others
"""


def test_shards_on_two_ranks_give_the_whole_models_logits_and_ranks_wait_asleep(job, models):
    done = job(["-c", SHARDED, models / "tiny"])
    assert done.returncode == 0, done.stderr


def test_more_threads_than_a_rank_is_bound_to_are_refused(job, models):
    done = job(whole_profile(models / "tiny"), OMP_NUM_THREADS="4096")
    assert done.returncode == 2, done.stderr
    assert "On rank 0 (" in done.stderr and "A rank needs 4096 CPUs for its threads" in done.stderr


def test_a_launcher_of_another_mpi_is_refused():
    """As srun without --mpi=pmix: each rank would take itself for the only one, and all would write one file."""
    pytest.importorskip("mpi4py")
    code = "from xrunner.comm.ranks import job\nwith job(): pass"
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI"))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=variables | {"SLURM_STEP_NUM_TASKS": "4"}
    )
    assert "InputError: 4 ranks were started, and MPI sees 1" in done.stderr


def test_a_process_without_a_launcher_is_alone():
    with ranks.job() as alone:
        assert (alone.rank, alone.size, alone.per_node, alone.nodes) == (0, 1, 1, ((0,),))
        assert alone.all("x") == ["x"] and alone.threads() is None and alone.threads(64) == 64

        def wrong():
            raise InputError("No such thing.")

        with pytest.raises(InputError, match=r"^No such thing\.$"):
            alone.agree(wrong)
