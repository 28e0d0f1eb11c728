"""The results file: whole at the end, resumable in the middle."""

from dataclasses import replace

import pytest

from xcore.errors import InputError
from xcore.requests.request import Result
from xrunner.core.results import ResultFile, read_results


def result(name):
    return Result(name, 3, (1, 2), "length", 0.0, 0.1, 0.2, 0.3, text="ab")


class Interrupted(Exception):
    pass


def interrupted(path, *names, torn=""):
    with pytest.raises(Interrupted), ResultFile(path, "run1") as file:
        for name in names:
            file.append(result(name))
        raise Interrupted
    with open(f"{path}.partial", "a") as partial:
        partial.write(torn)


def test_a_finished_run_leaves_the_file_alone(tmp_path):
    path = tmp_path / "r.jsonl"
    with ResultFile(path, "run1") as file:
        file.append(result("a"))
        assert not path.exists()
        assert (tmp_path / "r.jsonl.partial").read_text().count("\n") == 1  # flushed at once
        file.append(result("b"))
    assert read_results(path) == [result("a"), result("b")]
    assert [p.name for p in tmp_path.iterdir()] == ["r.jsonl"]


@pytest.mark.parametrize("torn", ["", '{"id": "c", "prom'])
def test_an_interrupted_run_goes_on(tmp_path, torn):
    path = tmp_path / "r.jsonl"
    interrupted(path, "a", "b", torn=torn)
    with ResultFile(path, "run1", resume=True) as file:
        assert file.done == {"a": result("a"), "b": result("b")}
        file.append(result("c"))
    assert [r.id for r in read_results(path)] == ["a", "b", "c"]


def test_a_run_that_ends_before_its_first_result_leaves_nothing(tmp_path):
    interrupted(tmp_path / "r.jsonl")
    (tmp_path / "r.jsonl.partial").unlink()  # made anew to be torn
    assert not list(tmp_path.iterdir())


def test_another_runs_results_are_not_mixed_in(tmp_path):
    path = tmp_path / "r.jsonl"
    interrupted(path, "a")
    with pytest.raises(InputError, match="belongs to another run"):
        ResultFile(path, "run2", resume=True)
    with pytest.raises(InputError, match="--resume"):
        ResultFile(path, "run2")


def test_a_first_start_may_be_a_resuming_one(tmp_path):
    """As of a job that is submitted again until it is done."""
    path = tmp_path / "r.jsonl"
    with ResultFile(path, "run1", resume=True) as file:
        assert not file.done
        file.append(result("a"))
    assert read_results(path) == [result("a")]
    with pytest.raises(InputError, match="of a complete run, which can't be resumed"):
        ResultFile(path, "run1", resume=True)
    assert read_results(path) == [result("a")]


def test_a_broken_middle_line_is_refused(tmp_path):
    path = tmp_path / "r.jsonl"
    interrupted(path, "a", torn="nonsense\n")
    with pytest.raises(InputError, match=r"partial', line 2, is not valid JSON.*Remove the file"):
        ResultFile(path, "run1", resume=True)


def test_texts_may_have_any_ends_of_lines(tmp_path):
    path, odd = tmp_path / "r.jsonl", replace(result("a"), text="one\u2028two\x85three\rfour\nfive\x1c")
    with ResultFile(path, "run1") as file:
        file.append(odd)
        file.append(result("b"))
    assert read_results(path) == [odd, result("b")]


def test_a_file_that_holds_no_results_is_named(tmp_path):
    path = tmp_path / "r.jsonl"
    for data in (b"\xff\n", b"nonsense\n"):
        path.write_bytes(data)
        with pytest.raises(InputError, match=r"r.jsonl', line 1, is not (valid JSON|a result in UTF-8)"):
            read_results(path)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(InputError, match="no folder"):
        ResultFile(tmp_path / "gone" / "r.jsonl", "run1")


def test_a_line_that_is_no_result_is_named_in_one_piece(tmp_path):
    (tmp_path / "r.jsonl").write_text('{"id": "a"}\n')
    with pytest.raises(InputError, match=r"r.jsonl', line 1: prompt_tokens is missing"):
        read_results(tmp_path / "r.jsonl")
