"""`exegpt show` of clusters, and the YAML form that --cluster takes."""

from dataclasses import replace

import pytest

from xcore.specs.cluster import parse_cluster
from xcore.specs.device_sheets import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_the_printed_file_is_the_cluster(exegpt, tmp_path, kind):
    done = exegpt("show", f"2x4x{kind}", "--yaml")
    assert done.code == 0 and done.err == ""
    path = tmp_path / "mine.yaml"
    path.write_text(done.out)
    assert replace(parse_cluster(str(path)), name="") == replace(parse_cluster(f"2x4x{kind}"), name="")


def test_a_cluster_is_shown_by_name_and_by_file(exegpt, tmp_path):
    printed = exegpt("show", "8xH100").out
    assert "8xH100-SXM" in printed and "3,350 GB/s" in printed
    (tmp_path / "mine.yaml").write_text("nodes: 3\ndevices_per_node: 2\nkind: A40\n")
    assert "3 of 2 A40" in exegpt("show", tmp_path / "mine.yaml").out
    assert exegpt("show", "8xH200", "--json").json["cluster"]["name"] == "8xH200-SXM"


def test_names_of_files_may_end_in_capitals(exegpt, tmp_path):
    (tmp_path / "MINE.YML").write_text("nodes: 1\ndevices_per_node: 2\nkind: A40\n")
    assert "1 of 2 A40" in exegpt("show", tmp_path / "MINE.YML").out
    sizes = "--model opt-125m --workload 16/8 --policy orca".split()
    assert exegpt("simulate", "--cluster", tmp_path / "MINE.YML", *sizes).code == 0
    (tmp_path / "R.JSONL").write_text("")
    assert "is not a schedule" not in exegpt("show", tmp_path / "R.JSONL").err  # but results


@pytest.mark.parametrize("text", ["8xZ80", "nonsense"])
def test_what_is_neither_file_nor_cluster_is_refused(exegpt, text):
    done = exegpt("show", text)
    assert (done.code == 2 and "kind" in done.err) or "is not a cluster" in done.err
