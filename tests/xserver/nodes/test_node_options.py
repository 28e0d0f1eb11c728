"""The options of nodes: addresses, tokens and directories; and plans that stay on one node."""

import json
import socket
from dataclasses import replace

import pytest

from exegpt.cli.node_addresses import host_and_port, node_addresses
from tests.exegpt.cli.conftest import run_command
from tests.xmulti.serving.test_replanning import planned
from xcore import document
from xcore.errors import InputError
from xmulti.serving.planned_units import NodesInUse
from xserver.nodes.node_link import NodeAddress


def refused(*arguments) -> str:
    """Return the sentence with which a command is refused."""
    done = run_command(*arguments)
    (line,) = done.err.strip().splitlines()
    assert done.code == 2 and done.out == "" and line.startswith("exegpt: ") and line.endswith(".")
    return line


def test_nodes_are_read():
    assert node_addresses(None) == (NodesInUse(named=False), ())
    nodes, addresses = node_addresses(["1=10.0.0.2:8100", "0=local", "2=[::1]:1", "3=gpu-3.example:65535"])
    assert nodes == NodesInUse(0, (1, 2, 3))
    assert addresses == (
        NodeAddress(1, "10.0.0.2", 8100),
        NodeAddress(2, "::1", 1),
        NodeAddress(3, "gpu-3.example", 65535),
    )
    assert [str(each) for each in addresses[:2]] == ["node 1 (10.0.0.2:8100)", "node 2 ([::1]:1)"]
    assert node_addresses(["0=a:1"])[0] == NodesInUse(None, (0,))


@pytest.mark.parametrize(
    "texts, why",
    [
        (["local"], "names no node"),
        (["one=local"], "names no node"),
        (["-1=local"], "names no node"),
        (["1="], "names no node"),
        (["1=10.0.0.2"], "is no address: write HOST:PORT"),
        (["1=10.0.0.2:0"], "is no address"),
        (["1=10.0.0.2:65536"], "is no address"),
        (["1=a b:1"], "is no address"),
        (["1=a:٨٠"], "is no address"),
        (["٨=a:1"], "names no node"),
        (["1=::1:80"], "is no address"),
        (["1=a..b:80"], "is no address"),
        (["1=a:1", "1=b:1"], "names node 1 twice"),
        (["1=a:1", "1=local"], "names node 1 twice"),
        (["0=local", "1=local"], "has two nodes, 0 and 1, on this machine"),
    ],
    ids=str,
)
def test_what_is_no_node_is_refused(texts, why):
    with pytest.raises(InputError, match=why):
        node_addresses(texts)


def test_a_launcher_needs_a_token_of_some_length(tmp_path, monkeypatch):
    monkeypatch.delenv("EXEGPT_NODE_TOKEN", raising=False)
    assert "A launcher needs a token: `openssl rand -hex 32 > token` makes one for --token-file" in refused("launch")
    token = tmp_path / "token"
    token.write_text("123456789012345\n")
    token.chmod(0o600)
    assert "The token has 15 characters, but needs at least 16" in refused("launch", "--token-file", token)
    monkeypatch.setenv("EXEGPT_NODE_TOKEN", "short")
    assert "The token has 5 characters" in refused("launch")
    assert "There is no key file" in refused("launch", "--token-file", tmp_path / "gone")


def test_a_launcher_says_what_is_wrong_with_its_options(tmp_path, monkeypatch):
    monkeypatch.setenv("EXEGPT_NODE_TOKEN", "0123456789abcdef")
    assert "--listen '8100' is no address" in refused("launch", "--listen", "8100")
    assert "There is no directory '/gone': correct --model" in refused("launch", "--model", "a=/gone")
    assert "--model x names no model: pass --model NAME=DIR" in refused("launch", "--model", "x")
    assert "--log-format 'xml' is not known" in refused("launch", "--log-format", "xml")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port} can't be opened (address already in use): pass another --listen" in refused(
            "launch", "--listen", f"127.0.0.1:{port}"
        )
    assert "[1:2]:8100 can't be opened (" in refused("launch", "--listen", "[1:2]:8100")
    assert host_and_port("127.0.0.1:80", "--listen") == ("127.0.0.1", 80)


def test_nodes_need_a_plan(tmp_path):
    assert "--node needs a plan" in refused("serve", "--model", tmp_path, "--node", "0=local")
    assert "--node-token-file needs a plan" in refused("serve", "--model", tmp_path, "--node-token-file", "nosuchfile")


def test_no_option_of_nodes_is_without_effect(tmp_path, monkeypatch):
    """A token without a launcher, and a node that the plan doesn't have."""
    monkeypatch.setenv("EXEGPT_NODE_TOKEN", "0123456789abcdef")
    plan = planned({"a": 1.0})
    document.write(tmp_path / "one.json", plan)
    document.write(tmp_path / "two.json", replace(plan, cluster=replace(plan.cluster, nodes=2)))
    serve = ("serve", "--plan", tmp_path / "one.json")
    for at in ((), ("--node", "0=local")):
        assert "--node-token-file is for launchers: pass --node NODE=HOST:PORT too" in refused(
            *serve, *at, "--node-token-file", "nosuchfile"
        )
    assert "--node names node 7, but '" in (line := refused(*serve, "--node", "0=local", "--node", "7=127.0.0.1:1"))
    assert "one.json' has only node 0: correct it" in line
    assert "names node 2, but" in (line := refused(*serve[:2], tmp_path / "two.json", "--node", "2=local"))
    assert "two.json' has nodes 0 to 1: correct it" in line


@pytest.fixture
def models(tmp_path):
    """One model whose requests are done sooner on both nodes."""
    path = tmp_path / "models.yaml"
    path.write_text("models:\n  - {name: chat, model: llama-3.1-8b, workload: 64/16, requests: 400}\n")
    return path


def test_a_model_stays_on_one_node_where_the_plan_is_to_be_served(models, tmp_path):
    """Without --one-node it spans both, which the table shows, and which the server refuses."""
    common = ("plan", models, "--cluster", "2x1xA40", "--profile", "roofline", "--method", "spatial")
    spans = run_command(*common, "--out", tmp_path / "plan.json")
    assert "chat: on several nodes, which `exegpt serve --plan` can't run: for that, plan with --one-node" in spans.err
    rows = [line.split() for line in spans.out.splitlines()]
    assert any(row[:2] == ["chat", "0,"] for row in rows)
    at = ("--node", "0=local", "--node", "1=there:1")
    assert "has model chat on nodes 0, 1, but a server runs each engine on one node: plan with --one-node" in refused(
        "serve", "--plan", tmp_path / "plan.json", *at
    )
    kept = run_command(*common, "--one-node", "--json", "--out", tmp_path / "plan.json")
    (model,) = json.loads(kept.out)["plan"]["models"]
    assert model["devices"] == [0]
    assert "is for 2 nodes, and --node does not name node 0, which has chat: start `exegpt launch` there" in refused(
        "serve", "--plan", tmp_path / "plan.json"
    )
    assert "which only `exegpt serve --plan` can run: plan for one node" in refused(
        "run", "--plan", tmp_path / "plan.json", "--requests", models, "--out", tmp_path / "out.jsonl"
    )
    shown = run_command("show", tmp_path / "plan.json")
    assert "node" in shown.out.splitlines()[2].split()
    simulated = json.loads(run_command("simulate", "--plan", tmp_path / "plan.json", "--json").out)
    assert simulated["models"][0]["nodes"] == [0]
    assert "node" in run_command("simulate", "--plan", tmp_path / "plan.json").out.splitlines()[2].split()


def test_one_node_is_for_plans_of_budgets(tmp_path):
    (tmp_path / "a.yaml").write_text("nodes:\n  - {name: a, model: llama-2-7b, workload: 64/16, requests: 5}\n")
    assert "--one-node applies to plans of budgets" in refused(
        "plan", tmp_path / "a.yaml", "--cluster", "2xA40", "--method", "samullm", "--one-node"
    )
