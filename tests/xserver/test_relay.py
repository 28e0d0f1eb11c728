"""A leader on another machine than the frontend: rank 0 relays. Both ranks are on this one, and take it for two."""

import contextlib
import http.client
import json
import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.xserver.conftest import schedule_for
from tests.xserver.test_faults import LONG, ask, check_all, prompts, under_load
from tests.xserver.test_ranks import launched
from xcore import document
from xcore.specs.schedule import Stage

pytest.importorskip("mpi4py")
RELAYED = "tests.xserver.two_machines"
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def want(server):
    """The tokens of a server of one rank."""
    return [ask(server, prompt)[1]["choices"][0]["token_ids"] for prompt in prompts(12)]


def on_two(model, policy, stages, **variables):
    schedule = schedule_for(model, policy, **variables)
    return replace(schedule, stages=stages, cluster=replace(schedule.cluster, devices_per_node=2))


@pytest.fixture(scope="module")
def led_by_rank_1(model):
    """Rank 0 prefills, and rank 1 decodes and decides."""
    stages = (Stage((0,), 1, "encode", None, (0, 2)), Stage((1,), 1, "decode", None, (0, 2)))
    return on_two(model, "waa-m", stages, encode_batch=2, decode_batch=6, micro_batches=1)


@pytest.fixture(scope="module")
def led_by_rank_0(model):
    """A pipeline."""
    stages = (Stage((0,), 1, "both", None, (0, 1)), Stage((1,), 1, "both", None, (1, 2)))
    return on_two(model, "orca", stages)


def written(schedule, directory):
    path = directory / "schedule.json"
    document.write(path, schedule)
    return path


def rank_of(server, rank):
    """The process of a launched rank."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            names = (folder / "environ").read_text().split("\0")
            command = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if f"OMPI_COMM_WORLD_RANK={rank}" in names and "serve" in command and str(server.port) in command:
            return int(folder.name)
    raise AssertionError(f"there is no rank {rank}")


def sockets(pid, state):
    """The local and remote addresses of a process's TCP sockets in this state, as the kernel writes them."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            inodes.add(os.readlink(entry))
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [line[1:3] for line in lines if f"socket:[{line[9]}]" in inodes and line[3] == state]


def relayed(server):
    """Whether rank 1 is connected to where rank 0 relays: MPI listens at no single address."""
    relays = {local for local, _ in sockets(rank_of(server, 0), "0A") if local.startswith("0100007F")}
    return any(remote in relays for _, remote in sockets(rank_of(server, 1), "01"))


def running(server):
    lines = server.get("/metrics")[2].decode().splitlines()
    (value,) = [float(line.split()[1]) for line in lines if line.startswith("exegpt_running_requests ")]
    return value


def wait_until(condition, seconds=20.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
def test_tokens_aborts_and_the_drain_go_through_the_relay(model, led_by_rank_1, tmp_path, want):
    with launched(model, written(led_by_rank_1, tmp_path), tmp_path, program=RELAYED) as server:
        assert relayed(server)
        check_all(under_load(server, lambda: None), want)
        leaving = http.client.HTTPConnection("127.0.0.1", server.port)
        body = json.dumps(LONG | {"prompt": [1, 2, 3], "n": 4, "max_tokens": 120, "stream": True})
        leaving.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        assert leaving.getresponse().read(10) and running(server) > 0
        leaving.sock.shutdown(socket.SHUT_RDWR)
        leaving.close()
        wait_until(lambda: b'exegpt_requests_total{class="usual",outcome="cancelled"} 1.0' in server.get("/metrics")[2])
        check_all(under_load(server, lambda: server.process.send_signal(signal.SIGUSR1)), want)
        assert server.process.wait(30) == 0, server.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_engine(model, led_by_rank_1, tmp_path, rank):
    with launched(model, written(led_by_rank_1, tmp_path), tmp_path, program=RELAYED) as server:
        answers = under_load(server, lambda: os.kill(rank_of(server, rank), signal.SIGKILL), count=6)
        assert {status for status, _ in answers} <= {200, 500}
        assert all(status == 200 or answer["error"]["code"] == "internal_error" for status, answer in answers)
        assert server.process.wait(20) != 0
        with pytest.raises(OSError):
            wait_until(lambda: server.get("/health")[0] != 200)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["exegpt", RELAYED])
def test_the_leader_moves_and_no_request_is_lost(model, led_by_rank_0, led_by_rank_1, tmp_path, want, program):
    token = tmp_path / "token"
    token.write_text("secret\n")
    options = "--admin-token-file", str(token), "--pinned"
    with launched(model, written(led_by_rank_0, tmp_path), tmp_path, *options, program=program) as server:

        def follow(schedule):
            assert server.post("/schedule", document.to_dict(schedule), X_Admin_Token="secret")[0] == 202

        def policy():
            return json.loads(server.get("/schedule")[2])["schedule"]["policy"]

        for schedule in (led_by_rank_1, led_by_rank_0, led_by_rank_1):
            check_all(under_load(server, lambda schedule=schedule: follow(schedule)), want)
            wait_until(lambda schedule=schedule: policy() == schedule.policy)
            check_all([ask(server, prompt) for prompt in prompts(2)], want[:2])
            assert relayed(server) == (program == RELAYED and schedule is led_by_rank_1)
        server.process.send_signal(signal.SIGUSR1)
        assert server.process.wait(30) == 0, server.log.read_text()
