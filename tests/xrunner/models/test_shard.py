"""Shards of a model against the whole: what they add up to is what one device computes."""

import threading

import pytest
import torch

from xcore.errors import InputError
from xcore.specs.model import ModelSpec
from xrunner.models import Shard, load_model, random_model

from .conftest import ARCHITECTURES
from .test_decoder import IDS, logits

SPEC = ModelSpec("m", "llama", 2, 64, 8, 2, 8, 96, True, 300, 128)


def sharded(load, of, call):
    """What `call` gives on each of `of` shards, which meet for every all-reduce."""
    barrier = threading.Barrier(of, timeout=60)
    parts, results = [None] * of, [None] * of

    def work(rank):
        def all_reduce(x):
            parts[rank] = x.clone()
            barrier.wait()
            total = torch.stack(parts).sum(0)
            barrier.wait()
            return total

        try:
            results[rank] = call(load(Shard(rank, of, all_reduce)))
        except BaseException:
            barrier.abort()
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(of)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("of", [2, 4])
def test_shards_together_give_the_whole_models_logits(directories, arch, of):
    """Of two KV heads, four shards keep two copies each."""
    unsplit = logits(load_model(directories[arch]), IDS, (40, None))
    results = sharded(
        lambda shard: load_model(directories[arch], shard=shard), of, lambda m: logits(m, IDS, (40, None))
    )
    for mine in results:
        torch.testing.assert_close(mine, unsplit, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_layers_partial_sums_add_up(directories, arch):
    """The attention half alone: partial outputs, biases and the residual counted once, summed without any transport."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 64, generator=generator)
    attended = torch.randn(5, 4, 16, generator=generator)

    def projected(model, heads):
        partial = model.layers[1].shard.once(x.clone())  # it may be overwritten
        return model.layers[1].output(attended[:, heads].flatten(1), residual=partial)

    with torch.inference_mode():
        unsplit = projected(load_model(directories[arch]), slice(0, 4))
        shards = [load_model(directories[arch], shard=Shard(rank, 2, lambda x: x)) for rank in range(2)]
        parts = [projected(shard, slice(2 * rank, 2 * rank + 2)) for rank, shard in enumerate(shards)]
    torch.testing.assert_close(parts[0] + parts[1], unsplit, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(parts[0], unsplit, atol=1e-2)


def test_a_shard_holds_its_share_of_the_weights_and_of_the_cache():
    model = random_model(SPEC, layers=1, shard=Shard(3, 4, lambda x: x))
    share = model.share
    assert (share.heads, share.kv_heads, share.ffn, share.head_size, share.hidden) == (2, 1, 24, 8, 64)
    layer = model.layers[0]
    products = [(p.outputs, p.inputs) for p in (layer.qkv, layer.output, layer.gated.layer, layer.down)]
    assert products == list(SPEC.layer_matrices(4))
    cache = model.new_cache(3, 16)
    assert cache.bytes == 3 * 16 * SPEC.kv_bytes(4, "fp32")


def test_a_model_that_cannot_be_split_so_is_refused():
    with pytest.raises(InputError, match="can't be split into 3 shards, only into 1, 2, 4, 8"):
        random_model(SPEC, layers=1, shard=Shard(0, 3, lambda x: x))
