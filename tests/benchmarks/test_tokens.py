"""Tokens beside transformers', on two ranks of the CPU, and differences that are found."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import tokens
from benchmarks.gpu import __main__ as gpu
from benchmarks.model_sizes import ModelSizes
from xcore.requests.request import Request, Result
from xrunner.models.device import CPU

SIZES = ModelSizes(3, 32, 2, 48, 300, 64)


@pytest.mark.slow
def test_two_ranks_give_transformers_tokens(monkeypatch):
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install -e '.[mpi]'")
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setenv("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
    rows = tokens.run_two_ranks(5, 0, CPU, ("llama",), SIZES)
    assert [row.policy for row in rows] == ["rra, two stages", "orca, TP 2", "waa"]
    for row in rows:
        assert row.requests == 5 and row.tokens > 10 and not row.differences


def test_another_token_is_a_difference_unless_it_is_a_near_tie():
    def results(*ids):
        return [Result("a", 1, ids, "length", 0.0, 0.0, 0.0, 0.0)]

    expected = {"a": ([1, 2, 3], [0.5, 1e-6, 0.5])}
    for ids, compared, ties, differences in (((1, 2, 3), 3, 0, 0), ((1, 9, 3), 1, 1, 0), ((9, 2, 3), 0, 0, 1)):
        row = tokens.compare("llama", "rra", results(*ids), expected)
        assert (row.tokens, row.near_ties, row.differences) == (compared, ties, differences)


def test_two_ways_may_part_where_logits_are_near_each_other():
    """Of two tokens, 10⁻⁵ or 1 apart in logits whose standard deviation is about 1."""

    def results(*ids):
        return [Result("a", 1, ids, "length", 0.0, 0.0, 0.0, 0.0)]

    prefixes = []

    def theirs(ids):
        prefixes.append(ids[0].tolist())
        return SimpleNamespace(logits=torch.tensor([[[1.0, 1.00001, 0.0, -1.0]]]))

    todo = [Request("a", (7, 8), 3)]
    for other, counted in (((2, 0, 3), (3, 0, 0)), ((2, 1, 3), (1, 1, 0)), ((2, 2, 3), (1, 0, 1))):
        row = tokens.compare_both("llama", "rra", theirs, todo, (results(2, 0, 3), results(*other)))
        assert (row.tokens, row.near_ties, row.differences) == counted
    assert prefixes == [[7, 8, 2]] * 2


def test_roundings_to_half_are_within_its_near_tie(tmp_path):
    """They move the difference of the two largest logits by less than half of it, and not by far less."""
    replace(tokens.SIZES, kv_heads=2).create(tmp_path / "llama", seed=0)
    half = tokens.load(tmp_path / "llama", "llama").half()
    ids = torch.randint(0, tokens.SIZES.vocab, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        rounded, exact = half(ids).logits.float(), half.float()(ids).logits
    moved = (rounded - exact).gather(-1, exact.topk(2).indices).diff().abs() / exact.std(-1, keepdim=True)
    assert tokens.NEAR_TIE_HALF / 10 < moved.max() < tokens.NEAR_TIE_HALF / 2


def test_missing_mpi_is_printed(monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.job.has_mpi", lambda: False)
    assert gpu._two_ranks(CPU) == [{"left_out": "no mpirun or no mpi4py"}]
    assert "left out for lack of mpirun" in capsys.readouterr().out


def test_a_failed_job_is_printed(capsys):
    def broken():
        raise SystemExit("there is no mpirun")

    assert gpu._compared(broken) == [{"failed": "SystemExit: there is no mpirun"}]
    assert "there is no mpirun" in capsys.readouterr().out
