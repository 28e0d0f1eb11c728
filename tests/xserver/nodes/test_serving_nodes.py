"""A plan over two nodes: a launcher on each, with its own working directory, and one server in front of both."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.xserver.conftest import free_port, schedule_for, started
from tests.xserver.test_faults import LONG, prompts, until_accepted
from tests.xserver.test_plan import BLOCKS, BOUND_S, ESTIMATE, NAMES, directories  # noqa: F401
from xcore import document
from xcore.requests.request import Request
from xcore.specs.cluster_plan import Plan, PlannedModel, Share
from xrunner.core.engine import Engine
from xrunner.models import load_model

AHEAD_S = 5000.0
"""How far the monotonic clock of node 1 and of its engines is ahead of the server's."""
SHIFTED = f"""
import time
_real = time.monotonic
time.monotonic = lambda: _real() + {AHEAD_S}
"""
pytestmark = pytest.mark.timeout(300)


class Node:
    """A node's launcher, with a working directory and models of its own."""

    def __init__(self, folder: Path, token: Path, *options: str, clock: str = ""):
        self.folder, self.port, self._options = folder, free_port(), [*options, "--token-file", str(token)]
        folder.mkdir()
        (folder / "clock").mkdir()
        (folder / "clock" / "sitecustomize.py").write_text(clock)
        self.start()

    def start(self):
        path = os.pathsep.join([str(self.folder / "clock"), str(Path(__file__).parents[3])])
        command = [sys.executable, "-m", "exegpt", "launch", "--listen", f"127.0.0.1:{self.port}", *self._options]
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, stderr=log, env=os.environ | {"NO_COLOR": "1", "PYTHONPATH": path}
            )

    @property
    def engines(self):
        """The processes of its engines."""
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(child) for child in listed.read_text().split()] if listed.exists() else []

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(20)


def in_time(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.fixture(scope="module")
def plan(directories):  # noqa: F811
    """`tiny` has a device of each node; `wide` and `deep` share the other device of node 1."""

    def planned(name, device, shares):
        schedule = replace(schedule_for(directories[name]), latency_bound_s=BOUND_S, admission="grow")
        schedule = replace(schedule, kv_blocks=BLOCKS) if shares else schedule
        share = Share("time", pool="merged") if shares else None
        return PlannedModel(name, (device,), schedule, ESTIMATE, share=share, directory=str(directories[name]))

    models = [planned("tiny", 0, False), planned("tiny", 2, False), planned("wide", 3, True), planned("deep", 3, True)]
    cluster = replace(models[0].schedule.cluster, nodes=2, devices_per_node=2)
    return Plan(Plan.VERSION, "exegpt", cluster, tuple(models))


@pytest.fixture(scope="module")
def nodes(directories, tmp_path_factory):  # noqa: F811
    """Two launchers. Node 0 has `tiny` at the server's path; all other models of both nodes are elsewhere."""
    folder = tmp_path_factory.mktemp("nodes")
    token = folder / "token"
    token.write_text("0123456789abcdef\n")
    token.chmod(0o600)
    options = []
    for name in NAMES:
        shutil.copytree(directories[name], folder / "models" / name)
        options += ["--model", f"{name}=../models/{name}"]
    launched = [Node(folder / "node0", token, *options[2:]), Node(folder / "node1", token, *options, clock=SHIFTED)]
    yield launched
    for node in launched:
        with contextlib.suppress(ProcessLookupError):
            node.process.kill()


@pytest.fixture(scope="module")
def served(plan, nodes, directories, tmp_path_factory):  # noqa: F811
    """The server. Its own directories of models that run only on node 1 have no weights."""
    folder = tmp_path_factory.mktemp("frontend")
    document.write(folder / "plan.json", plan)
    options = ["--plan", str(folder / "plan.json"), "--pinned", "--node-token-file", str(folder / "token")]
    options += ["--admin-token-file", str(folder / "token")]
    for name in NAMES[1:]:
        shutil.copytree(directories[name], folder / name, ignore=shutil.ignore_patterns("*.safetensors"))
        options += ["--model", f"{name}={folder / name}"]
    shutil.copy(nodes[0].folder.parent / "token", folder / "token")
    for number, node in enumerate(nodes):
        options += ["--node", f"{number}=127.0.0.1:{node.port}"]
    with started(options, folder, engines=3) as server:
        in_time(lambda: all_ready(server))
        yield server


def status(server, name, replica=0):
    return json.loads(server.get(f"/status?model={name}&replica={replica}")[2])


def all_ready(server):
    return all(status(server, *each)["state"] == "ready" for each in [("tiny", 0), ("tiny", 1), ("wide",), ("deep",)])


def ask(server, model, prompt, **options):
    answered, _, data = server.post("/v1/completions", LONG | {"model": model, "prompt": prompt} | options)
    return answered, json.loads(data)


def tokens(answer):
    return answer["choices"][0]["token_ids"]


def metric(server, series):
    lines = server.get("/metrics")[2].decode().splitlines()
    (value,) = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(series)]
    return value


@pytest.fixture(scope="module")
def want(directories):  # noqa: F811
    """The tokens of each model's six prompts, from an engine in this process."""
    asked = [Request(str(i), tuple(prompt), LONG["max_tokens"], ignore_eos=True) for i, prompt in enumerate(prompts(6))]
    return {
        name: [list(done.output_ids) for done in Engine(load_model(path), schedule_for(path)).run(asked).results]
        for name, path in directories.items()
    }


def test_a_wrong_token_ends_the_server_with_a_sentence(plan, nodes, tmp_path):
    document.write(tmp_path / "plan.json", plan)
    (tmp_path / "token").write_text("fedcba9876543210\n")
    at = [f"--node={number}=127.0.0.1:{node.port}" for number, node in enumerate(nodes)]
    options = ["--plan", str(tmp_path / "plan.json"), "--node-token-file", str(tmp_path / "token"), *at]
    command = [sys.executable, "-m", "exegpt", "serve", "--port", str(free_port()), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    address = rf"node [01] \(127.0.0.1:({nodes[0].port}|{nodes[1].port})\)"
    sentence = rf"exegpt: The launcher of {address} does not have this server's token: give both the same token file\."
    assert re.fullmatch(sentence, done.stderr.strip().splitlines()[-1])
    in_time(lambda: "does not have this launcher's token" in (nodes[0].folder / "log").read_text())


def test_models_of_two_nodes_give_their_own_tokens(served, nodes, want):
    with ThreadPoolExecutor(18) as pool:
        asked = [(name, i, pool.submit(ask, served, name, prompts(6)[i])) for name in NAMES for i in range(6)]
        for name, i, answer in asked:
            code, completion = answer.result()
            assert (code, tokens(completion)) == (200, want[name][i])
    sent = [metric(served, f'exegpt_tokens_total{{kind="output",model_name="tiny",replica="{r}"') for r in (0, 1)]
    assert min(sent) > 0, "both replicas have answered"
    assert [len(node.engines) for node in nodes] == [1, 2]
    children = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text()
    assert not children.split(), "the server itself has no engine"


def test_the_clock_of_another_machine_is_converted(served, nodes):
    """Without it, waits would be thousands of seconds too long or too short."""
    for name in ("wide", "deep"):
        series = f'exegpt_queue_wait_seconds_sum{{model_name="{name}"'
        before_s, begin_s = metric(served, series), time.monotonic()
        for _ in range(4):
            assert ask(served, name, [1, 2, 3], max_tokens=3)[0] == 200
        lasted_s = time.monotonic() - begin_s
        in_time(lambda name=name: status(served, name)["active_requests"] == 0)
        assert 0 <= metric(served, series) - before_s < lasted_s
        spans = [span for row in status(served, name)["timeline"]["measured"] for span in row["spans"]]
        assert spans and all(0 <= begin < 300 and 0 <= lasts < 60 for _, begin, lasts, _ in spans)


def test_pages_name_the_node(served, nodes):
    assert status(served, "wide")["node"] == {
        "number": 1,
        "address": f"127.0.0.1:{nodes[1].port}",
        "reachable": True,
    }
    assert [status(served, "tiny", replica)["node"]["number"] for replica in (0, 1)] == [0, 1]
    assert metric(served, 'exegpt_node_up{model_name="",node="1"}') == 1


def test_an_engine_that_is_lost_is_replaced(served, nodes, want):
    with ThreadPoolExecutor(6) as pool:
        asked = [(i, pool.submit(ask, served, "wide", prompts(6)[i])) for i in range(6)]
        until_accepted(served, [answer for _, answer in asked], ["wide"])
        before = nodes[1].engines
        (shared,) = [pid for pid in before if b"--plan" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
        os.kill(shared, signal.SIGKILL)
        for i, answer in asked:
            code, completion = answer.result()
            assert (code, tokens(completion)) == (200, want["wide"][i])
    in_time(lambda: all_ready(served))
    assert len(nodes[1].engines) == 2 and len(set(before) & set(nodes[1].engines)) == 1
    assert "the engine of wide, deep has ended (exit code -9) and is restarted" in served.log.read_text()


def test_requests_of_a_lost_node_continue_on_a_replica_or_wait(served, nodes, want):
    lost = metric(served, 'exegpt_engine_restarts_total{model_name="wide"')
    with ThreadPoolExecutor(18) as pool:
        asked = [
            (name, i, pool.submit(ask, served, name, prompts(6)[i])) for name in ("tiny", "wide") for i in range(6)
        ]
        until_accepted(served, [answer for *_, answer in asked], ["tiny", "wide"])
        engines = nodes[1].engines
        nodes[1].end(signal.SIGKILL)
        in_time(lambda: served.get("/ready")[0] == 503)
        refused = ask(served, "deep", [1])[1]["error"]
        assert refused["code"] == "node_lost" and f"node 1 (127.0.0.1:{nodes[1].port})" in refused["message"]
        assert metric(served, 'exegpt_node_up{model_name="",node="1"}') == 0
        assert not status(served, "wide")["node"]["reachable"]
        for name, i, answer in asked:
            if name == "tiny":
                code, completion = answer.result()
                assert (code, tokens(completion)) == (200, want[name][i])
        assert ask(served, "tiny", [1], max_tokens=1)[0] == 200, "new ones go to the replica on node 0"
        in_time(lambda: not any(Path(f"/proc/{pid}").exists() for pid in engines))
        nodes[1].start()
        for name, i, answer in asked:
            code, completion = answer.result()
            assert (code, tokens(completion)) == (200, want[name][i])
    in_time(lambda: all_ready(served))
    assert metric(served, 'exegpt_engine_restarts_total{model_name="wide"') == lost + 1
    assert metric(served, 'exegpt_node_up{model_name="",node="1"}') == 1


def follow(server, plan):
    return server.post("/plan", document.to_dict(plan), X_Admin_Token="0123456789abcdef")


def test_models_move_to_another_node_with_their_requests(served, nodes, plan, want):
    """They move from node 1 to node 0, which has another clock."""
    models = [replace(model, devices=(1,)) if model.share else model for model in plan.models]
    with ThreadPoolExecutor(12) as pool:
        asked = [(name, i, pool.submit(ask, served, name, prompts(6)[i])) for name in NAMES[1:] for i in range(6)]
        until_accepted(served, [answer for *_, answer in asked], NAMES[1:])
        assert follow(served, replace(plan, models=tuple(models)))[0] == 202
        for name, i, answer in asked:
            code, completion = answer.result()
            assert (code, tokens(completion)) == (200, want[name][i])
    in_time(lambda: all_ready(served))
    assert [len(node.engines) for node in nodes] == [2, 1]
    assert [status(served, name)["node"]["number"] for name in NAMES] == [0, 0, 0]
    elsewhere = replace(plan.cluster, nodes=3)
    away = [replace(model, devices=(5,)) if model.share else model for model in plan.models]
    code, _, body = follow(served, replace(plan, cluster=elsewhere, models=tuple(away)))
    assert code == 400 and "--node does not name node 2" in json.loads(body)["error"]["message"]
    series = 'exegpt_queue_wait_seconds_sum{model_name="wide"'
    before_s = metric(served, series)
    assert ask(served, "wide", [1, 2, 3], max_tokens=3)[0] == 200
    in_time(lambda: status(served, "wide")["active_requests"] == 0)
    assert 0 <= metric(served, series) - before_s < 60


def test_engines_of_all_nodes_end_with_the_server(served, nodes):
    """Requests in progress are answered before. This test is the last in the file, because it ends the server."""
    engines = [pid for node in nodes for pid in node.engines]
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(ask, served, "wide", prompt) for prompt in prompts(6)]
        until_accepted(served, asked, ["wide"])
        served.process.send_signal(signal.SIGTERM)
        assert [answer.result()[0] for answer in asked] == [200] * 6
    assert served.process.wait(30) == 0
    assert len(engines) == 3
    in_time(lambda: not any(Path(f"/proc/{pid}").exists() for pid in engines), 20)
    assert [node.end() for node in nodes] == [0, 0]
    assert {path.name for path in nodes[1].folder.iterdir()} == {"clock", "log"}, "it has written nothing else"
