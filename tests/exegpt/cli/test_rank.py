"""`exegpt rank`: from prompts to a ranker, to what it reaches, to a run in its order."""

import json

import pytest


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Prompts of two kinds, one with long outputs."""
    path = tmp_path_factory.mktemp("rank") / "prompts.jsonl"
    rows = [
        {
            "prompt": f"{'list' if i % 2 else 'essay'} {i}",
            "output_tokens": 5 + i % 7 if i % 2 else 90 + i % 31,
            "kind": "short" if i % 2 else "long",
        }
        for i in range(300)
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


@pytest.fixture(scope="module")
def ranker(exegpt, prompts):
    path = prompts.with_name("ranker.npz")
    done = exegpt("rank", "train", prompts, "--out", path, "--epochs", 12, "--threads", 1)
    assert done.code == 0 and "Trained on" in done.out, done.err
    return path


def test_a_ranker_is_evaluated_beside_what_needs_no_training(exegpt, prompts, ranker):
    done = exegpt("rank", "evaluate", prompts, "--ranker", ranker, "--json").json
    rows = {row["name"]: row for row in done["rows"]}
    assert done["part"] == "test" and done["prompts"] == sum(done["kinds"].values())
    assert rows["ranker"]["across"] > 0.95 > rows["prompt length, long first"]["tau"]
    assert rows["oracle"]["tau"] == 1.0 and set(rows["classifier"]["within"]) == {"short", "long"}
    printed = exegpt("rank", "evaluate", prompts, "--ranker", ranker, "--no-classifier", "--part", "all").out
    assert "300 prompts, all prompts" in printed and "classifier" not in printed and "between kinds" in printed


def test_a_run_takes_the_ranker(exegpt, tiny, tiny_profile, ranker, tmp_path):
    """Short outputs are promised for `list`, which came later."""
    requests, out = tmp_path / "r.jsonl", tmp_path / "out.jsonl"
    rows = [
        {"id": f"{word} {i}", "prompt": f"{word} {i}", "max_tokens": 4} for word in ("essay", "list") for i in "123"
    ]
    requests.write_text("\n".join(map(json.dumps, rows)))
    common = ("run", "-m", tiny, "-r", requests, "-p", tiny_profile, "--policy", "orca", "--max-num-seqs", 1, "-o", out)
    done = exegpt(*common, "--order", "learned", "--ranker", ranker)
    assert done.code == 0, done.err
    ended = [json.loads(line)["id"].split()[0] for line in out.read_text().splitlines()]
    assert ended == ["list"] * 3 + ["essay"] * 3


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"output_tokens": 5}', "line 1 has no prompt"),
        ('{"prompt": "a", "output_tokens": 0}', "output_tokens = 0: it must be a whole number of at least 1"),
        ('{"prompt": "a", "output_tokens": 5}', "has 1 prompts: a ranker needs at least 20"),
        ("[1", "is not"),
    ],
)
def test_bad_prompts_are_refused_by_line(exegpt, tmp_path, line, sentence):
    path = tmp_path / "p.jsonl"
    path.write_text(line + "\n")
    done = exegpt("rank", "train", path, "--out", tmp_path / "r.npz")
    assert done.code == 2 and sentence in done.err and "Traceback" not in done.err


def test_other_files_are_refused(exegpt, prompts, tmp_path):
    (tmp_path / "r.npz").write_text("nothing")
    done = exegpt("rank", "evaluate", prompts, "--ranker", tmp_path / "r.npz")
    assert done.code == 2 and "is not a ranker" in done.err
    done = exegpt("rank", "evaluate", prompts, "--ranker", tmp_path / "r.npz", "--part", "most")
    assert done.code == 2 and "--part 'most' is not known" in done.err
    done = exegpt("rank", "train", prompts, "--out", tmp_path / "no" / "r.npz")
    assert done.code == 2 and "Traceback" not in done.err
