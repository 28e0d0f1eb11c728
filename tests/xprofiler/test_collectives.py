"""Links from tables, and which ranks measure which link; the measuring itself is in test_ranks.py."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.profile import Table
from xprofiler.collectives import link, pairs
from xprofiler.measured_cluster import found_cluster, write_cluster
from xprofiler.profiles import find_profile
from xrunner.comm.ranks import Ranks


def table(*values, sizes=(1e3, 1e6, 1e9)):
    return Table(("bytes",), (sizes,), values)


def test_a_link_has_the_least_messages_time_and_the_largests_rate_beyond_it():
    fitted = link(table(1e-5, 1.1e-4, 0.1 + 1e-5))
    assert (fitted.latency_s, fitted.bandwidth_bytes_s) == (1e-5, pytest.approx(1e10))
    # an all-reduce over four devices moves 2 · 3/4 bytes for each of its own
    assert link(table(1e-5, 1.1e-4, 0.1 + 1e-5), share=1.5).bandwidth_bytes_s == pytest.approx(1.5e10)


def test_a_noisy_link_that_is_slowest_with_little_still_has_a_rate():
    assert link(table(2e-5, 2e-5, 1e-5)).bandwidth_bytes_s == pytest.approx(1e14)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (((0,),), {}),
        (((0, 1, 2),), {"send": (0, 1)}),
        (((0,), (1,)), {"send_between_nodes": (0, 1)}),
        (((0, 2), (1, 3)), {"send": (0, 2), "send_between_nodes": (2, 1)}),  # ranks dealt to nodes in turn
    ],
)
def test_neighbouring_stages_measure_the_links(nodes, expected):
    assert pairs(SimpleNamespace(nodes=nodes, per_node=len(nodes[0]))) == expected


def test_the_cluster_found_is_read_back_from_its_file(tmp_path, monkeypatch):
    from xprofiler import machine

    monkeypatch.setattr(machine, "matrix_flops_s", lambda dtype: 1e11)
    monkeypatch.setattr(machine, "read_bandwidth_bytes_s", lambda: 2e10)
    local = parse_cluster("local")
    cluster = found_cluster(Ranks(), local.intra, local.inter)
    write_cluster(tmp_path / "found.yaml", cluster)
    assert parse_cluster(str(tmp_path / "found.yaml")) == cluster
    assert (cluster.devices, cluster.device.flops_s, cluster.device.bandwidth_bytes_s) == (1, {"fp32": 1e11}, 2e10)
    assert cluster.device.memory_bytes == local.device.memory_bytes


def test_without_a_profile_a_found_cluster_is_answered_from_its_own_rates(tmp_path):
    """And not from what is known of the machine that happens to ask."""
    local = parse_cluster("local")
    rates = replace(local.device, flops_s={"fp32": 1e11}, bandwidth_bytes_s=2e10)
    write_cluster(tmp_path / "found.yaml", replace(local, device=rates, devices_per_node=2))
    profile, which = find_profile(None, builtin_model("gpt2"), parse_cluster(str(tmp_path / "found.yaml")), "fp32")
    assert "roofline" in which and profile.provenance["flops_s"] == "1e+11"
    assert [tables.tp for tables in profile.degrees] == [1, 2]
