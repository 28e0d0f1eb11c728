"""The layers against transformers' of the same weights."""

import json

import pytest
import torch

from xcore.errors import InputError
from xcore.specs.model import ModelSpec
from xrunner.models import AttentionBatch, Batch, load_model, random_model
from xrunner.models.create import create_model

from .conftest import ARCHITECTURES, SIZES, vary_vectors


def prompt_batch(ids, past, table, block_size):
    """A chunk of one prompt that follows `past` cached tokens."""
    positions = torch.arange(past, past + len(ids))
    blocks = torch.tensor(table)[positions // block_size]
    return Batch(
        ids,
        positions,
        blocks * block_size + positions % block_size,
        (
            AttentionBatch(
                0,
                len(ids),
                torch.tensor([table], dtype=torch.int32),
                torch.tensor([0, len(ids)], dtype=torch.int32),
                torch.tensor([past + len(ids)], dtype=torch.int32),
            ),
        ),
        None,
    )


def logits(model, ids, chunks=(None,), block_size=16):
    """Logits of every position of one sequence, computed in chunks."""
    cache = model.new_cache(9, block_size)
    out, past = [], 0
    for chunk in chunks:
        part = ids[past : None if chunk is None else past + chunk]
        states = model.forward(prompt_batch(part, past, [7, 2, 4, 1, 8, 3, 0, 6], block_size), cache)
        out.append(model.ends.logits(states))
        past += len(part)
    return torch.cat(out)


def theirs(directory, ids, dtype=torch.float32):
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)(ids[None]).logits[0]


IDS = torch.randint(0, 300, (100,), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("chunks", [(None,), (1, 40, None), (16, 16, None)])
def test_logits_are_transformers(directories, arch, chunks):
    mine = logits(load_model(directories[arch]), IDS, chunks)
    torch.testing.assert_close(mine, theirs(directories[arch], IDS), atol=5e-5, rtol=1e-4)


ROPE = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 5000.0,
    },
}


def changed(directories, arch, tmp_path, **config):
    """A copy of a model directory with other values in its config."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in directories[arch].iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    old = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(old | config))
    return copy


@pytest.mark.parametrize("kind", ROPE)
def test_scaled_rotary_embeddings(directories, tmp_path, kind):
    copy = changed(directories, "llama", tmp_path, rope_parameters=ROPE[kind])
    torch.testing.assert_close(logits(load_model(copy), IDS), theirs(copy, IDS), atol=5e-5, rtol=1e-4)


def test_rotary_scaling_as_older_configs_write_it(directories, tmp_path):
    scaling = {k: v for k, v in ROPE["llama3"].items() if k != "rope_theta"}
    old = {"rope_parameters": None, "rope_scaling": scaling, "rope_theta": 5000.0}
    copy = changed(directories, "llama", tmp_path, **old)
    new = copy.parent / "new"
    new.mkdir()
    mine = logits(load_model(copy), IDS)
    copy_of_new = changed(directories, "llama", new, rope_parameters=ROPE["llama3"])
    torch.testing.assert_close(mine, logits(load_model(copy_of_new), IDS), atol=0, rtol=0)


def test_a_tied_head(directories, tmp_path):
    from safetensors.torch import load_file, save_file

    copy = changed(directories, "llama", tmp_path, tie_word_embeddings=True)
    with_head = logits(load_model(copy), IDS)
    torch.testing.assert_close(with_head, theirs(copy, IDS), atol=5e-5, rtol=1e-4)
    tensors = load_file(copy / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    without = logits(load_model(copy), IDS)
    torch.testing.assert_close(without, theirs(copy, IDS), atol=5e-4, rtol=1e-4)
    assert (with_head - without).abs().max() > 1


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3", "opt"])
@pytest.mark.parametrize("chunks", [(None,), (1, 16, None)])
def test_odd_sizes_biases_and_ties(tmp_path, arch, chunks):
    """Heads of 10, three of them to a KV head, a block of another size, and the other choice about the head's tie."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"num_hidden_layers": 2, "hidden_size": 60, "num_attention_heads": 6, "vocab_size": 301}
    other = (
        {"ffn_dim": 77, "word_embed_proj_dim": 60, "tie_word_embeddings": False}
        if arch == "opt"
        else {"intermediate_size": 77, "num_key_value_heads": 2, "head_dim": 10, "tie_word_embeddings": True}
    )
    windows = {"mistral": {"sliding_window": 7}, "qwen3": {"layer_types": ["sliding_attention", "full_attention"]}}
    more = windows.get(arch, {}) | ({"use_sliding_window": True, "sliding_window": 9} if arch == "qwen3" else {})
    spread = {"max_position_embeddings": 120, ("init_std" if arch == "opt" else "initializer_range"): 0.3}
    torch.manual_seed(1)
    config = AutoConfig.for_model(arch, **sizes, **other, **more, **spread, pad_token_id=0, eos_token_id=1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "m")
    vary_vectors(tmp_path / "m")
    expected = theirs(tmp_path / "m", IDS)
    torch.testing.assert_close(logits(load_model(tmp_path / "m"), IDS, chunks, 13), expected, atol=1e-4, rtol=1e-4)


def test_a_mistral_without_a_window_in_its_config_has_4096():
    from xcore.architectures.llama_family import attention_window

    assert attention_window({"model_type": "mistral"}, 0) == 4096
    assert attention_window({"model_type": "mistral", "sliding_window": None}, 0) is None


@pytest.mark.parametrize("arch", ["mistral", "qwen2"])
def test_windows_make_a_difference(directories, tmp_path, arch):
    wide = changed(directories, arch, tmp_path, sliding_window=None if arch == "mistral" else 128)
    near, far = logits(load_model(directories[arch]), IDS), logits(load_model(wide), IDS)
    torch.testing.assert_close(near[:20], far[:20], atol=1e-4, rtol=1e-4)
    assert (near[40:] - far[40:]).abs().max() > 0.1


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_bfloat16_is_as_near_to_float64_as_transformers_is(directories, arch):
    """With the same weights; transformers computes each operator in PyTorch's bfloat16."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(directories[arch], dtype=torch.bfloat16)
    with torch.inference_mode():
        plain, exact = reference(IDS[None]).logits[0], reference.double()(IDS[None]).logits[0]
    mine = logits(load_model(directories[arch], "bf16"), IDS, (40, None))
    errors, allowed = ((x.double() - exact).abs() for x in (mine, plain))
    assert mine.dtype == torch.bfloat16
    assert errors.mean() <= 1.05 * allowed.mean()
    assert errors.amax(1).mean() <= 1.05 * allowed.amax(1).mean()  # each row's greatest error


@pytest.mark.parametrize(
    ("arch", "config", "words"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rope_parameters"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters with factor = None"),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": "4"}}, "factor = '4'"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor = None"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": -1.0}}, "factor = -1.0"),
        ("llama", {"rope_parameters": None, "rope_theta": "1e4"}, "rope_theta = '1e4'"),
        ("llama", {"rope_parameters": ["linear"]}, "must be an object"),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "'several'"),
        ("llama", {"sliding_window": 64}, "sliding_window"),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer_types"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("llama", {"eos_token_id": "end"}, "eos_token_id"),
        ("gpt2", {"activation_function": "relu"}, "activation_function"),
        ("opt", {"activation_function": "gelu"}, "activation_function"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("opt", {"word_embed_proj_dim": 32}, "opt-350m"),
        ("opt", {"enable_bias": False}, "enable_bias"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(directories, tmp_path, arch, config, words):
    with pytest.raises(InputError, match=words):
        load_model(changed(directories, arch, tmp_path, **config))


def test_unknown_dtype(directories):
    with pytest.raises(InputError, match="fp8"):
        load_model(directories["llama"], "fp8")


def test_end_of_text(directories, tmp_path):
    assert load_model(directories["gpt2"]).eos == {256}
    copy = changed(directories, "gpt2", tmp_path, eos_token_id=[5, 6])
    assert load_model(copy).eos == {5, 6}
    (copy / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert load_model(copy).eos == {9}


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_one_random_layer(architecture):
    kv_heads = 2 if architecture == "llama" else 4
    gated = architecture == "llama"
    spec = ModelSpec("m", architecture, 30, 64, 4, kv_heads, 16, 128, gated, 500, 64, tied_embeddings=not gated)
    model = random_model(spec, layers=1)
    assert len(model.layers) == 1
    with torch.inference_mode():
        x, cache = model.ends.embed(torch.arange(5), torch.arange(5)), model.new_cache(1, 16)
        (keys,), (values,) = cache.keys, cache.values
        q = model.layers[0].before_attention(x, torch.arange(5), keys, values, torch.arange(3))
        assert q.shape == (5, 4, 16) and keys.shape == (1, kv_heads, 16, 16) and values.shape == (1, kv_heads, 16, 16)
        assert keys[..., :3].all() and not keys[..., 3:].any()
        assert values[..., :3, :].all() and not values[..., 3:, :].any()
        y = model.layers[0].after_attention(x, q.contiguous())
    assert y.shape == x.shape and y.isfinite().all() and model.sample(y).shape == (5,)


def test_long_batches_in_row_chunks_are_the_same(monkeypatch, directories):
    from xrunner.models import row_chunks

    model = load_model(directories["llama"])
    unsplit = logits(model, IDS)
    monkeypatch.setattr(row_chunks, "_ROWS", 7)
    torch.testing.assert_close(logits(model, IDS), unsplit, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("on_gpu", "calls"), [(False, [1024, 1024, 2]), (True, [2050])])
def test_a_gpu_takes_long_batches_whole(monkeypatch, on_gpu, calls):
    from exegpt.kernels import gpu_device
    from xrunner.models.row_chunks import in_row_chunks

    monkeypatch.setattr(gpu_device, "on_gpu", lambda x: on_gpu)
    seen = []
    in_row_chunks(lambda rows: seen.append(len(rows[0])) or rows[0], torch.zeros(2050, 1))
    assert seen == calls


def test_cache_beyond_memory(directories):
    with pytest.raises(InputError, match="GiB"):
        load_model(directories["llama"]).new_cache(2**40, 16)


def test_logits_are_well_spread(tmp_path):
    create_model(tmp_path / "m", "llama", kv_heads=2, **SIZES)
    mine = logits(load_model(tmp_path / "m"), IDS)
    assert 1 < mine.std() < 10
    assert len(set(mine.argmax(-1).tolist())) > 50
