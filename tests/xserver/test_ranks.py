"""Several ranks: under the server's own mpirun, and started by a launcher."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.mpi import launcher_environment
from tests.xserver.conftest import STARTS_S, Server, free_port, schedule_for, serving
from tests.xserver.test_faults import ask, check_all, prompts, under_load
from xcore import document
from xcore.specs.schedule import Stage

pytest.importorskip("mpi4py")


@pytest.fixture(scope="module")
def want(server):
    """The tokens of a server of one rank."""
    return [ask(server, prompt)[1]["choices"][0]["token_ids"] for prompt in prompts(12)]


@pytest.fixture(scope="module")
def two_stages(model, tmp_path_factory):
    """A schedule of a pipeline of two ranks."""
    schedule = schedule_for(model)
    stages = (Stage((0,), 1, "both", None, (0, 1)), Stage((1,), 1, "both", None, (1, 2)))
    path = tmp_path_factory.mktemp("two") / "schedule.json"
    cluster = replace(schedule.cluster, devices_per_node=2)
    document.write(path, replace(schedule, stages=stages, cluster=cluster))
    return path


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_killed_rank_loses_no_request(model, two_stages, tmp_path, want):
    with serving(model, two_stages, tmp_path, "--ranks", "2") as server:

        def kill():
            ranks = subprocess.run(["pgrep", "-f", f"engine .*{model}.*--socket"], capture_output=True, text=True)
            os.kill(max(map(int, ranks.stdout.split())), signal.SIGKILL)

        check_all(under_load(server, kill), want)
        assert "is restarted" in server.log.read_text()


@contextmanager
def launched(model, schedule, directory, *options, program="exegpt"):
    """`mpirun exegpt serve`, when it is ready."""
    port, log = free_port(), directory / "log"
    mpirun = [f"{os.path.dirname(sys.executable)}/mpirun", "-n", "2", "--bind-to", "none"]
    command = [sys.executable, "-m", program, "serve", "-m", str(model), "-s", str(schedule), "--port", str(port)]
    environment = os.environ | launcher_environment(directory)
    with log.open("w") as written:
        process = subprocess.Popen(
            [*mpirun, *command, "--threads", "1", *options], stdout=written, stderr=written, env=environment
        )
    server, until = Server(process, port, log), time.monotonic() + STARTS_S
    try:
        while not server.ready():
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        yield server
    finally:
        process.kill()


@pytest.mark.timeout(180)
def test_launched_ranks_serve_and_drain(model, two_stages, tmp_path, want):
    with launched(model, two_stages, tmp_path) as server:
        check_all([ask(server, prompt) for prompt in prompts(3)], want[:3])
        rows = json.loads(server.get("/status")[2])["timeline"]["measured"]
        assert [row["device"] for row in rows] == [0, 1] and all(len(row["spans"]) >= 16 for row in rows)
        check_all(under_load(server, lambda: server.process.send_signal(signal.SIGUSR1)), want)
        assert server.process.wait(30) == 0, server.log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_terminated_job_ends_its_responses(model, two_stages, tmp_path):
    with launched(model, two_stages, tmp_path) as server:
        answers = under_load(server, server.process.terminate, count=6)
        assert {status for status, _ in answers} <= {200, 500}
        assert all(status == 200 or answer["error"]["code"] == "internal_error" for status, answer in answers)
        server.process.wait(20)
        until = time.monotonic() + 10
        with pytest.raises(OSError):
            while time.monotonic() < until:
                server.get("/health")
                time.sleep(0.1)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one CPU")
def test_a_frontend_uses_all_cpus_though_its_rank_is_bound():
    """The rank is this process, bound to one CPU; the frontend refuses its arguments, and is looked at before."""
    program = """
import os, sys
first = min(os.sched_getaffinity(0))
os.sched_setaffinity(0, {first})
from exegpt.api.frontend_process import FrontendProcess
frontend = FrontendProcess(["serve", "--model", "nothing"])
print(len(os.sched_getaffinity(frontend._process.pid)), len(os.sched_getaffinity(0)))
frontend.wait()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(len(os.sched_getaffinity(0))), "1"], done.stderr


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one CPU")
def test_a_frontend_uses_no_more_cpus_than_its_launcher():
    """The launcher is bound to one CPU, and starts the rank through a shell script."""
    program = """
import os
from exegpt.api.frontend_process import FrontendProcess
os.sched_setaffinity(0, set(range(os.cpu_count())))  # as a rank may do
frontend = FrontendProcess(["serve", "--model", "nothing"])
print(len(os.sched_getaffinity(frontend._process.pid)), len(os.sched_getaffinity(0)))
frontend.wait()
"""
    launcher = """
import os, subprocess, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
started = {**os.environ, "PMI_RANK": "0"}
subprocess.run(["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", sys.argv[1]], env=started)
"""
    command = [sys.executable, "-c", launcher, program]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PMI_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.split() == ["1", str(len(os.sched_getaffinity(0)))], done.stderr


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_replica_compiles_and_follows_grammars(model, tmp_path):
    """Each replica's driver compiles the grammars of its own requests."""
    pytest.importorskip("llguidance")
    schedule = schedule_for(model)
    path = tmp_path / "schedule.json"
    document.write(path, replace(schedule, replicas=2, cluster=replace(schedule.cluster, devices_per_node=2)))

    def answer(server, number):
        fields = {"type": "object", "properties": {f"field{number}": {"enum": [number]}}, "additionalProperties": False}
        schema = fields | {"required": [f"field{number}"], "x-guidance": {"whitespace_flexible": False}}
        format_ = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        body = {"prompt": [number], "max_tokens": 60, "temperature": 1.0, "response_format": format_}
        status, _, data = server.post("/v1/completions", body)
        return status, json.loads(json.loads(data)["choices"][0]["text"])

    with serving(model, path, tmp_path, "--ranks", "2") as server, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda number: answer(server, number), range(6)))
        assert answers == [(200, {f"field{number}": number}) for number in range(6)]
        server.process.terminate()
        assert server.process.wait(30) == 0
