"""How checkpoints say that their weights are quantised."""

import json

import pytest

from xcore.errors import InputError
from xcore.specs.builtin_models import builtin_config, builtin_model
from xcore.specs.model import BYTES, ModelSpec

INT4 = {"num_bits": 4, "type": "int", "group_size": 128}
FLOAT4 = {"num_bits": 4, "type": "float", "group_size": 16}


def packed(weights, **inputs):
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights, **inputs}}}


@pytest.mark.parametrize(
    ("declared", "dtype"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4"),
        ({"quant_method": "gptq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "w8a16"),
        (packed({"num_bits": 8, "type": "int"}), "w8a16"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        (packed(INT4), "int4"),
        (packed(FLOAT4), "nvfp4"),
        (packed(FLOAT4 | {"group_size": 32}), "mxfp4"),
        (packed({"num_bits": 8, "type": "float"}), "fp8"),
        (packed({"num_bits": 8, "type": "int"}, input_activations={"num_bits": 8}), "int8"),
        ({}, "bf16"),
    ],
)
def test_a_config_names_the_dtype_of_its_weights(declared, dtype):
    config = builtin_config("llama-3.1-8b") | {"quantization_config": declared}
    assert ModelSpec.from_config(config, "m").dtype == dtype


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({"quant_method": "gptq", "bits": 3}, "'gptq' of 3 bits"),
        ({"quant_method": "awq", "bits": 8}, "'awq' of 8 bits"),
        ({"quant_method": "gguf"}, "'gguf'"),
        ({"quant_algo": "MIXED_PRECISION"}, "'MIXED_PRECISION'"),
        (packed({"num_bits": 3, "type": "int"}), "several or unknown formats"),
        ({"bits": 4}, "bits '4'"),
        ({"quant_method": "compressed-tensors", "config_groups": ["group_0"]}, "several or unknown formats"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": "int4"}}, "several or unknown formats"),
        (packed("int4"), "several or unknown formats"),
        (packed(INT4 | {"type": ["int"]}), "several or unknown formats"),
        (packed({"num_bits": 4, "type": "float", "group_size": [16]}), "several or unknown formats"),
    ],
)
def test_a_format_whose_cost_is_not_known_is_named(declared, said):
    with pytest.raises(InputError, match=said):
        ModelSpec.from_config(builtin_config("llama-3.1-8b") | {"quantization_config": declared}, "m")


@pytest.mark.parametrize(
    ("file", "content", "dtype"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}, "nvfp4"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, "bf16"),
        ("quantize_config.json", {"quant_method": "gptq", "bits": 4}, "int4"),
        ("quantize_config.json", {"bits": 8, "group_size": 128}, "w8a16"),
        ("quant_config.json", {"quant_method": "awq", "w_bit": 4}, "int4"),
    ],
)
def test_a_file_beside_the_config_names_it_too(tmp_path, file, content, dtype):
    (tmp_path / "config.json").write_text(json.dumps(builtin_config("llama-3.1-8b")))
    (tmp_path / file).write_text(json.dumps(content))
    assert ModelSpec.from_directory(tmp_path).dtype == dtype


def write_header(file, **dtypes):
    """A safetensors file of one element per tensor, by the format's description: a length, a header, the data."""
    entries = {name: {"dtype": dtype, "shape": [1], "data_offsets": [0, 1]} for name, dtype in dtypes.items()}
    header = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0")


def test_files_show_the_dtype_of_weights_that_nothing_declares(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(builtin_config("llama-3.1-8b")))
    write_header(tmp_path / "a.safetensors", **{"norm.weight": "BF16", "h.0.attn.bias": "BOOL"})
    assert ModelSpec.from_directory(tmp_path).dtype == "bf16"
    write_header(tmp_path / "b.safetensors", **{"down_proj.weight": "F8_E4M3", "down_proj.weight_scale": "F32"})
    assert ModelSpec.from_directory(tmp_path).dtype == "fp8"
    write_header(tmp_path / "b.safetensors", **{"down_proj.weight": "I8"})
    with pytest.raises(InputError, match=r"quantised checkpoint .*'down_proj\.weight' in .* has dtype I8"):
        ModelSpec.from_directory(tmp_path)
    for other in (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", b"", b"\2" + bytes(7) + b"[]"):
        (tmp_path / "b.safetensors").write_bytes(other)
        assert ModelSpec.from_directory(tmp_path).dtype == "bf16"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "int4"),
        ("RedHatAI/Qwen3-32B-quantized.w8a8", "int8"),
        ("neuralmagic/Meta-Llama-3.1-70B-Instruct-FP8-dynamic", "fp8"),
        ("nvidia/Llama-3.3-70B-Instruct-FP4", "nvfp4"),
        ("nvidia/DeepSeek-R1-NVFP4", "nvfp4"),
        ("amd/Llama-3.1-405B-Instruct-MXFP4", "mxfp4"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "int4"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "int4"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "fp8"),
    ],
)
def test_names_of_checkpoints_say_it(name, dtype):
    assert builtin_model(name).dtype == dtype


@pytest.mark.parametrize("name", ["TheBloke/Llama-2-7B-GGUF", "unsloth/Llama-3.1-8B-bnb-4bit"])
def test_names_of_other_formats_are_refused_with_the_original(name):
    with pytest.raises(InputError, match=r"is a quantised checkpoint .* plan the original model with --model llama-"):
        builtin_model(name)


def test_bytes_are_those_of_the_checkpoints():
    llama = builtin_model("llama-3.1-70b")
    assert llama.checkpoint_bytes("int4") == pytest.approx(0.5195 * 68.45e9 + 2 * 2.1e9, rel=0.002)
    oss = builtin_model("gpt-oss-120b")  # 65.2 GB on the hub: the experts have four bits, the rest sixteen
    assert oss.checkpoint_bytes("mxfp4") == pytest.approx(65.2e9, rel=0.01)
    deepseek = builtin_model("deepseek-v3")
    assert sum(deepseek.layer_bytes(8, "fp8") for _ in range(8)) > deepseek.layer_bytes(1, "fp8") > 0
    assert set(BYTES) >= {"fp8", "int8", "int4", "mxfp4", "nvfp4"}
