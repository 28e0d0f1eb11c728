"""Model directories: what is written is whole and readable, and what is broken is named."""

import json
import shutil

import pytest
import torch

from xcore.errors import InputError
from xcore.specs.builtin_models import builtin_config
from xcore.specs.model import ModelSpec
from xrunner.models import load_model
from xrunner.models.create import create_model
from xrunner.models.weights import SafetensorsWeights

from .conftest import ARCHITECTURES, SIZES


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("shards", [1, 3])
def test_transformers_reads_what_is_created(tmp_path, arch, shards):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kv_heads = 4 if arch in ("gpt2", "opt") else 2
    spec = create_model(tmp_path / "m", arch, kv_heads=kv_heads, shards=shards, **SIZES)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert spec.parameters == sum(p.numel() for p in model.parameters())
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == shards
    mine = SafetensorsWeights(tmp_path / "m", torch.float32)
    for name, tensor in model.state_dict().items():
        if name in mine:
            assert torch.equal(mine.get(name, tuple(tensor.shape)), tensor)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    text = "Grüße, 世界!\n"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.encode()) and max(ids) < 256
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([299]) == "" and tokenizer.eos_token_id == 256


def test_an_architecture_that_can_only_be_planned_for_says_so(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(builtin_config("mixtral-8x7b")))
    with pytest.raises(
        InputError, match="architecture mixtral, which exegpt plans for but doesn't run: those that run"
    ):
        load_model(tmp_path)


def test_same_seed_same_model(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        create_model(tmp_path / name, seed=seed, **SIZES)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_bfloat16_is_half_as_large(tmp_path):
    create_model(tmp_path / "a", **SIZES)
    create_model(tmp_path / "b", dtype="bf16", **SIZES)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in "ab"]
    assert 0.45 < sizes[1] / sizes[0] < 0.55
    load_model(tmp_path / "b", "fp32")


@pytest.mark.parametrize(("dtype", "name"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_a_checkpoints_dtype_and_size_are_those_that_transformers_reads(tmp_path, dtype, name):
    from transformers import AutoModelForCausalLM

    spec = create_model(tmp_path / "m", dtype=dtype, shards=2, **SIZES)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert str(model.dtype) == f"torch.{name}"
    assert (spec.dtype, ModelSpec.from_directory(tmp_path / "m").dtype) == (dtype, dtype)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == spec.parameters * getattr(torch, name).itemsize


def test_weights_can_be_read_by_whoever_can_read_the_config(tmp_path):
    create_model(tmp_path / "m", shards=2, **SIZES)
    assert len({path.stat().st_mode for path in (tmp_path / "m").iterdir()}) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab": 256}, "257"),
        ({"shards": 4}, "shards"),
        ({"kv_heads": 3}, "KV heads"),
        ({"hidden": 66}, "66"),
        ({"layers": 0, "shards": 0}, "shards"),
        ({"arch": "bert"}, "bert"),
        ({"arch": "gpt2", "kv_heads": 2}, "KV heads"),
        ({"dtype": "int4"}, "int4"),
    ],
)
def test_sizes_that_do_not_fit(tmp_path, changes, words):
    with pytest.raises(InputError, match=words):
        create_model(tmp_path / "m", **SIZES | changes)
    assert not list(tmp_path.iterdir())


def test_an_existing_directory_is_left_alone(tmp_path):
    (tmp_path / "m").mkdir()
    with pytest.raises(InputError, match="exists already"):
        create_model(tmp_path / "m", **SIZES)
    assert not list((tmp_path / "m").iterdir())


def test_an_interruption_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("xrunner.models.create._write_tokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        create_model(tmp_path / "m", **SIZES)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def sharded(tmp_path):
    create_model(tmp_path / "m", shards=2, **SIZES)
    return tmp_path / "m"


def assert_refused(directory, *words):
    with pytest.raises(InputError) as error:
        load_model(directory)
    assert all(word in str(error.value) for word in words), error.value


def test_no_config(tmp_path):
    assert_refused(tmp_path, "config.json")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_truncated_file(sharded, share):
    path = sharded / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    assert_refused(sharded, "model-00002-of-00002.safetensors")


def test_missing_file(sharded):
    (sharded / "model-00001-of-00002.safetensors").unlink()
    assert_refused(sharded, "model-00001-of-00002.safetensors")


def test_no_weights_at_all(sharded):
    for path in sharded.glob("model*"):
        path.unlink()
    assert_refused(sharded, "model.safetensors")


def test_missing_tensor(sharded):
    index = sharded / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    del data["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(data))
    assert_refused(sharded, "model.norm.weight")


def test_a_tensor_that_its_file_lacks(sharded):
    index = sharded / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(data))
    assert_refused(sharded, "model.norm.weight", "model-00001-of-00002.safetensors")


@pytest.mark.parametrize("file", ["../m/model-00001-of-00002.safetensors", "/etc/passwd", 3])
def test_an_index_that_leaves_its_directory(sharded, file):
    index = sharded / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["model.norm.weight"] = file
    index.write_text(json.dumps(data))
    assert_refused(sharded, "index.json", "plain file names")


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none(sharded, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    assert_refused(sharded, "weight_map")


def test_wrong_shape(sharded):
    config = json.loads((sharded / "config.json").read_text())
    (sharded / "config.json").write_text(json.dumps(config | {"intermediate_size": 161}))
    assert_refused(sharded, "gate_proj", "[160, 64]", "[161, 64]")


@pytest.mark.parametrize(("arch", "prefix"), [("gpt2", "transformer."), ("opt", "model.")])
def test_first_published_names(tmp_path, arch, prefix):
    from safetensors.torch import load_file, save_file

    create_model(tmp_path / "m", arch, **SIZES)
    shutil.copytree(tmp_path / "m", tmp_path / "old")
    path = tmp_path / "old" / "model.safetensors"
    save_file({k.removeprefix(prefix): v for k, v in load_file(path).items()}, path)
    new, old = load_model(tmp_path / "m"), load_model(tmp_path / "old")
    assert torch.equal(new.ends.embedding, old.ends.embedding)
    assert torch.equal(new.ends.position_embedding, old.ends.position_embedding)
    assert ModelSpec.from_directory(tmp_path / "m").parameters == ModelSpec.from_directory(tmp_path / "old").parameters


def rewrite(directory, change):
    """Replace the tensors of a directory's one file by `change` of them."""
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors = load_file(path)
    save_file(change(tensors), path, metadata={"format": "pt"})


Q_PROJ = "model.layers.1.self_attn.q_proj"
QUANTISED = {
    "float8 with a scale": lambda t: {
        f"{Q_PROJ}.weight": t[f"{Q_PROJ}.weight"].to(torch.float8_e4m3fn),
        f"{Q_PROJ}.weight_scale": torch.ones(()),
    },
    "float8 alone": lambda t: {f"{Q_PROJ}.weight": t[f"{Q_PROJ}.weight"].to(torch.float8_e5m2)},
    "a block scale": lambda t: {f"{Q_PROJ}.weight_scale_inv": torch.ones(1, 1)},
    "an input scale": lambda t: {"model.layers.0.mlp.down_proj.input_scale": torch.ones(())},
    "scales of the KV cache": lambda t: {"model.layers.0.self_attn.k_scale": torch.ones(())},
    "packed integers": lambda t: {f"{Q_PROJ}.qweight": torch.zeros(8, 64, dtype=torch.int32)},
    "packed bytes": lambda t: {f"{Q_PROJ}.weight": torch.zeros(64, 32, dtype=torch.uint8)},
    "whole integers": lambda t: {f"{Q_PROJ}.weight": torch.zeros(64, 64, dtype=torch.int8)},
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_tensors_are_refused(tmp_path, kind):
    create_model(tmp_path / "m", **SIZES)
    rewrite(tmp_path / "m", lambda tensors: tensors | QUANTISED[kind](tensors))
    name = next(reversed(QUANTISED[kind]({f"{Q_PROJ}.weight": torch.zeros(64, 64)})))
    assert_refused(tmp_path / "m", "a quantised checkpoint", name.rpartition(".")[0], "model.safetensors")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, ["hf_quant_config.json", "FP8"]),
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
            ["hf_quant_config.json", "kv_cache_quant_algo 'FP8'"],
        ),
        ("hf_quant_config.json", {"producer": {"name": "modelopt"}}, ["hf_quant_config.json"]),
        ("quantize_config.json", {"bits": 3, "group_size": 128}, ["quantize_config.json", "3"]),
        ("quant_config.json", {"w_bit": 4, "version": "GEMV"}, ["quant_config.json", "GEMV"]),
        ("config.json", {"quantization_config": {"quant_method": "eetq"}}, ["quantization_config", "eetq"]),
        ("config.json", {"compression_config": {"format": "pack-quantized"}}, ["compression_config"]),
        ("config.json", {"quantization": {"group_size": 64, "bits": 4}}, ["quantization", "bits '4'"]),
        ("config.json", {"quant_config": {"w_bit": 4}}, ["quant_config", "w_bit '4'"]),
        ("config.json", {"sparsity_config": {"format": "sparse-24-bitmask"}}, ["sparsity_config"]),
    ],
)
def test_quantisation_files_are_refused(tmp_path, file, content, words):
    create_model(tmp_path / "m", **SIZES)
    path = tmp_path / "m" / file
    former = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(former | content))
    assert_refused(tmp_path / "m", "a quantised checkpoint", *words)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": None, "kv_cache_quant_algo": None}}),
        ("config.json", {"quantization_config": None}),
        ("config.json", {"quantization_config": {}}),
    ],
)
def test_files_without_quantisation_are_loaded(tmp_path, file, content):
    create_model(tmp_path / "m", **SIZES)
    path = tmp_path / "m" / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | content))
    assert len(load_model(tmp_path / "m").layers) == SIZES["layers"]


@pytest.mark.parametrize(
    ("arch", "extra"),
    [
        ("llama", f"{Q_PROJ}.bias"),
        ("llama", "model.layers.3.input_layernorm.weight"),  # one layer more than the config has
        ("llama", "model.layers.0.self_attn.q_norm.weight"),
        ("llama", f"{Q_PROJ}.lora_A.weight"),
        ("llama", "score.weight"),
        ("qwen2", "model.layers.0.self_attn.o_proj.bias"),
        ("gpt2", "h.0.ln_1.weight"),  # beside transformer.h.0.ln_1.weight
        ("opt", "model.decoder.project_in.weight"),
        ("t5", "encoder.block.0.layer.0.SelfAttention.q.bias"),
    ],
)
def test_a_tensor_that_no_layer_reads_is_refused(tmp_path, arch, extra):
    create_model(tmp_path / "m", arch, **SIZES)
    rewrite(tmp_path / "m", lambda tensors: tensors | {extra: torch.zeros(64)})
    assert_refused(tmp_path / "m", extra, "does not use tensor", "model.safetensors")


def test_a_stage_refuses_a_tensor_that_no_layer_of_the_whole_model_reads(tmp_path):
    create_model(tmp_path / "m", **SIZES)
    rewrite(tmp_path / "m", lambda tensors: tensors | {"model.layers.2.mlp.down_proj.bias": torch.zeros(64)})
    with pytest.raises(InputError, match=r"down_proj\.bias"):
        load_model(tmp_path / "m", layers=range(1), head=False)


@pytest.mark.parametrize(
    ("arch", "extra"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("llama", "model.rotary_emb.inv_freq"),
        ("gpt2", "transformer.h.0.attn.bias"),
        ("gpt2", "h.2.attn.masked_bias"),
        ("opt", "lm_head.weight"),
        ("t5", "decoder.embed_tokens.weight"),
        ("t5", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"),
    ],
)
def test_known_extras_are_passed_over(tmp_path, arch, extra):
    create_model(tmp_path / "m", arch, **SIZES)
    of_bits = arch == "gpt2"
    shape = (SIZES["vocab"], SIZES["hidden"]) if extra == "lm_head.weight" else (4,)
    rewrite(tmp_path / "m", lambda t: t | {extra: torch.zeros(shape, dtype=torch.uint8 if of_bits else torch.float32)})
    assert len(load_model(tmp_path / "m").layers) == SIZES["layers"]


def test_a_tensor_that_the_index_has_elsewhere(sharded):
    from safetensors.torch import load_file, save_file

    first, second = (sharded / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    copied = {"model.norm.weight": load_file(second)["model.norm.weight"] * 2}
    save_file(load_file(first) | copied, first, metadata={"format": "pt"})
    assert_refused(sharded, "model.norm.weight", str(first), second.name)


def test_a_tensor_that_the_index_lacks(sharded):
    from safetensors.torch import load_file, save_file

    first = sharded / "model-00001-of-00002.safetensors"
    save_file(load_file(first) | {"more": torch.zeros(2)}, first, metadata={"format": "pt"})
    assert_refused(sharded, "'more'", "in no file")


def test_an_index_beside_a_file_of_all_tensors(sharded):
    from safetensors.torch import save_file

    save_file({"model.norm.weight": torch.zeros(64)}, sharded / "model.safetensors")
    assert_refused(sharded, "model.safetensors", "index.json", "outdated")
