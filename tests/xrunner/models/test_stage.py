"""Stages of a model, one after the other, against the whole: each holds, and reads, its own part alone."""

import itertools
import threading

import pytest
import torch

from xcore.errors import InputError
from xrunner.models import Shard, load_model
from xrunner.models.create import create_model

from .conftest import ARCHITECTURES, SIZES
from .test_decoder import IDS, changed, logits, prompt_batch

TABLE = [7, 2, 4, 1, 8, 3, 0, 6]


def staged_logits(stages, ids, chunks):
    """Logits of every position of one sequence that goes through all stages, chunk after chunk."""
    caches = [stage.new_cache(9, 16) for stage in stages]
    out, past = [], 0
    for chunk in chunks:
        part = ids[past : None if chunk is None else past + chunk]
        x = None
        for stage, cache in zip(stages, caches, strict=True):
            x = stage.forward(prompt_batch(part, past, TABLE, 16), cache, x)
        out.append(stages[-1].ends.logits(x))
        past += len(part)
    return torch.cat(out)


def load_stages(directory, cuts=(0, 2, 3), **options):
    last = len(cuts) - 2
    return [
        load_model(directory, layers=range(cuts[i], cuts[i + 1]), embedding=i == 0, head=i == last, **options)
        for i in range(last + 1)
    ]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("cuts", [(0, 2, 3), (0, 1, 2, 3)])
def test_stages_together_are_the_whole(directories, arch, cuts):
    stages = load_stages(directories[arch], cuts)
    assert [len(stage.layers) for stage in stages] == [b - a for a, b in itertools.pairwise(cuts)]
    assert len(stages[0].new_cache(2, 16).keys) == cuts[1]
    unsplit = logits(load_model(directories[arch]), IDS, (40, None))
    torch.testing.assert_close(staged_logits(stages, IDS, (40, None)), unsplit, atol=0, rtol=0)


def test_a_tied_head_on_another_stage(directories, tmp_path):
    from safetensors.torch import load_file, save_file

    copy = changed(directories, "llama", tmp_path, tie_word_embeddings=True)
    tensors = load_file(copy / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    stages = load_stages(copy)
    torch.testing.assert_close(staged_logits(stages, IDS, (None,)), logits(load_model(copy), IDS), atol=0, rtol=0)


def test_only_the_last_stage_picks_rows(directories):
    """The states of every row go on to the next stage, even where only one is followed by a token."""
    from dataclasses import replace

    first, last = load_stages(directories["llama"])
    batch = replace(prompt_batch(IDS[:20], 0, TABLE, 16), rows=torch.tensor([19]))
    x = first.forward(batch, first.new_cache(9, 16))
    assert x.shape == (20, 64)
    token = last.step(batch, last.new_cache(9, 16), x)
    unsplit = load_model(directories["llama"])
    assert token.tolist() == unsplit.step(batch, unsplit.new_cache(9, 16)).tolist() and token.shape == (1,)


def test_a_stage_reads_its_own_files_alone(tmp_path):
    """Three files: one layer each, the last with the embedding and the head too."""
    create_model(tmp_path / "m", "llama", kv_heads=2, shards=3, **SIZES)
    (tmp_path / "m" / "model-00002-of-00003.safetensors").unlink()
    (tmp_path / "m" / "model-00003-of-00003.safetensors").unlink()
    assert len(load_model(tmp_path / "m", layers=range(1), embedding=False, head=False).layers) == 1
    with pytest.raises(InputError, match="00003-of-00003"):
        load_model(tmp_path / "m", layers=range(1), embedding=True, head=False)
    with pytest.raises(InputError, match="00002-of-00003"):
        load_model(tmp_path / "m", layers=range(1, 2), embedding=False, head=False)


def test_shards_of_stages(directories):
    """Two stages of two shards each: a grid of four devices."""
    barrier = threading.Barrier(2, timeout=60)
    parts, results = [None, None], [None, None]

    def work(rank):
        def all_reduce(x):
            parts[rank] = x.clone()
            barrier.wait()
            total = parts[0] + parts[1]
            barrier.wait()
            return total

        try:
            stages = load_stages(directories["llama"], shard=Shard(rank, 2, all_reduce))
            results[rank] = staged_logits(stages, IDS, (40, None))
        except BaseException:
            barrier.abort()
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    unsplit = logits(load_model(directories["llama"]), IDS, (40, None))
    for mine in results:
        torch.testing.assert_close(mine, unsplit, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("layers", [range(2, 4), range(1, 1), range(-1, 2), 4, 0])
def test_layers_that_the_model_lacks(directories, layers):
    with pytest.raises(InputError, match=r"has layers\[0:3\]"):
        load_model(directories["llama"], layers=layers)
