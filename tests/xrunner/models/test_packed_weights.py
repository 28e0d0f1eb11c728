"""Quantised checkpoints: packed here by each format's own rules, they give the logits of their dequantised weights."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from exegpt.kernels.quantized_weight import rounded_to_nearest
from xcore.errors import InputError
from xcore.specs.model import ModelSpec
from xcore.specs.quantization import PackedFormat
from xrunner.models import load_model
from xrunner.models.create import create_model
from xrunner.models.packed_weights import packed, read_packed, unpacked
from xrunner.models.quantize import quantize_model
from xrunner.models.shard import Shard
from xrunner.rank.warm_up import alike

SIZES = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 300, "context": 64}
AWQ_OUTPUT = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ: the output in each place of a word


def words(codes, bits, order=None):
    """The last axis in words of 32 bits, one code after the other: slow, and by Python's integers."""
    per = 32 // bits
    rows = []
    for line in codes.tolist():
        line += [0] * (-len(line) % per)
        rows.append([])
        for start in range(0, len(line), per):
            part = [line[start + (i if order is None else order[i])] for i in range(per)]
            value = sum(code << (bits * i) for i, code in enumerate(part))
            rows[-1].append(value - 2**32 if value >= 2**31 else value)
    return torch.tensor(rows, dtype=torch.int32)


def pack(layout, weight, bits, size, g):
    """A matrix's tensors in a layout with random codes, and the matrix that they stand for."""
    outputs, inputs = weight.shape
    size = inputs if size == -1 else size
    groups = inputs // size
    codes = torch.randint(0, 2**bits, (outputs, inputs), generator=g)
    zeros = torch.randint(1, 2**bits, (outputs, groups), generator=g)
    scales = ((torch.rand(outputs, groups, generator=g) + 0.5) / 2**bits / 4).half()
    index = torch.arange(inputs) // size
    if layout == "gptq-order":
        index = index[torch.randperm(inputs, generator=g)]
    if layout.startswith("symmetric") or layout == "channel":
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    full = (codes - zeros[:, index]) * scales.float()[:, index]
    if layout.startswith("gptq"):
        stored = zeros if layout == "gptq-v2" else zeros - 1
        parts = {"qweight": words(codes, bits).t(), "qzeros": words(stored.t(), bits), "scales": scales.t()}
        return full, parts | {"g_idx": index.int()} | ({"bias": torch.zeros(outputs)} if layout == "gptq" else {})
    if layout == "awq":
        parts = {"qweight": words(codes.t(), bits, AWQ_OUTPUT), "qzeros": words(zeros.t(), bits, AWQ_OUTPUT)}
        return full, parts | {"scales": scales.t()}
    parts = {"weight_packed": words(codes, bits), "weight_scale": scales.bfloat16()}
    full = (codes - zeros[:, index]) * scales.bfloat16().float()[:, index]
    if layout == "asymmetric":
        parts["weight_zero_point"] = words(zeros.t(), bits).t()
    return full, parts | {"weight_shape": torch.tensor([outputs, inputs])}


def config_of(layout, bits, size):
    if layout.startswith("gptq"):
        more = {"checkpoint_format": "gptq_v2"} if layout == "gptq-v2" else {"desc_act": layout == "gptq-order"}
        return {"quant_method": "gptq", "bits": bits, "group_size": size, **more}
    if layout == "awq":
        return {"quant_method": "awq", "bits": bits, "group_size": size, "version": "gemm", "zero_point": True}
    weights = {"num_bits": bits, "type": "int", "symmetric": layout != "asymmetric", "strategy": "group"}
    weights |= {"strategy": "channel", "group_size": None} if layout == "channel" else {"group_size": size}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, "ignore": []}


def write(root, layout, bits, size, plain=("layers.1.self_attn.k_proj",)):
    """A quantised model and its dequantised twin; matrices in `plain` are not quantised."""
    create_model(root / "twin", "qwen2", **SIZES)
    shutil.copytree(root / "twin", root / "q")
    tensors, g = load_file(root / "twin" / "model.safetensors"), torch.Generator().manual_seed(bits)
    twin, quantised = {}, {}
    for name, tensor in tensors.items():
        matrix = name.endswith("_proj.weight") and not any(part in name for part in plain)
        twin[name], parts = pack(layout, tensor, bits, size, g) if matrix else (tensor, {"weight": tensor})
        base = name.removesuffix("weight")
        quantised |= {base + end: part.contiguous() for end, part in parts.items()} if matrix else {name: tensor}
    for kept, directory in ((twin, "twin"), (tensors_with_biases(quantised, tensors), "q")):
        save_file(kept, root / directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((root / "q" / "config.json").read_text())
    config["quantization_config"] = config_of(layout, bits, size)
    (root / "q" / "config.json").write_text(json.dumps(config))
    return root / "q", root / "twin"


def tensors_with_biases(quantised, tensors):
    return quantised | {name: tensor for name, tensor in tensors.items() if name.endswith("bias")}


@torch.inference_mode()
def logits(model):
    batch = alike(1, 20, 20, 16, None, 1, model.device)
    return model.ends.logits(model.forward(batch, model.new_cache(2, 16)))


@pytest.mark.parametrize(
    ("layout", "bits", "size"),
    [
        ("gptq", 4, 32),
        ("gptq", 8, 64),
        ("gptq-v2", 4, -1),
        ("gptq-order", 4, 32),
        ("awq", 4, 32),
        ("symmetric", 4, 32),
        ("asymmetric", 4, 64),
        ("channel", 8, -1),
    ],
)
def test_a_checkpoint_gives_the_logits_of_its_dequantised_weights(tmp_path, layout, bits, size):
    quantised, twin = write(tmp_path, layout, bits, size)
    assert ModelSpec.from_directory(quantised).dtype == {4: "int4", 8: "w8a16"}[bits]
    got, expected = logits(load_model(quantised, {4: "w4a32", 8: "w8a32"}[bits])), logits(load_model(twin))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    narrow = logits(load_model(quantised, {4: "int4", 8: "w8a16"}[bits]))
    assert narrow.dtype == torch.bfloat16
    assert (narrow - expected).abs().mean() < 0.05 * expected.std()


@pytest.mark.parametrize("layout", ["gptq", "awq", "asymmetric"])
def test_shards_add_up(tmp_path, layout):
    quantised, _ = write(tmp_path, layout, 4, 32)
    whole = load_model(quantised, "w4a32").layers[0]
    sums = []
    for name, width in (("output", 64), ("down", 128)):
        x = torch.randn(3, width)
        parts = [load_model(quantised, "w4a32", shard=Shard(rank, 2, lambda x: x)).layers[0] for rank in range(2)]
        halves = [
            getattr(part, name)(x[:, half])
            for part, half in zip(parts, (slice(width // 2), slice(width // 2, width)), strict=True)
        ]
        sums.append((sum(halves), getattr(whole, name)(x)))
        both = torch.cat([part.gated.layer(x[:, :64])[:, :64] for part in parts], 1)
        torch.testing.assert_close(both, whole.gated.layer(x[:, :64])[:, :128], rtol=1e-5, atol=1e-5)
    for got, expected in sums:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bits": 3}, "bits = 3"),
        ({"bits": 4.0}, r"bits = 4\.0"),
        ({"group_size": 0}, "group_size = 0"),
        ({"group_size": 33}, "group_size = 33"),
        ({"dynamic": {"-:.*": {}}}, "dynamic"),
        ({"checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "awq", "version": "gemv"}, "gemv"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "float-quantized"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path, change, said):
    create_model(tmp_path / "m", **SIZES)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    declared = {"quant_method": "gptq", "bits": 4, "group_size": 32} | change
    with pytest.raises(InputError, match=said):
        from xcore.specs.quantization import packed_format

        packed_format(config | {"quantization_config": declared}, tmp_path / "m", "m")


@pytest.mark.parametrize(("end", "shape"), [("weight_zero_point", (64, 2)), ("weight_g_idx", (256,))])
def test_misshapen_zero_points_and_groups_are_named(end, shape):
    parts = {"weight_packed": torch.zeros(64, 16, dtype=torch.int32), "weight_scale": torch.ones(64, 4)}
    parts[end] = torch.zeros(shape, dtype=torch.int8)
    with pytest.raises(InputError, match=f"Tensor '{end}' of the quantised matrix 'a' has shape"):
        read_packed(parts.get, PackedFormat("compressed-tensors", 4, 32), (64, 128), "a")


@pytest.mark.parametrize(
    ("end", "dtype"),
    [
        *(("qweight", torch.int8), ("qzeros", torch.uint8), ("g_idx", torch.int16), ("g_idx", torch.float32)),
        *(("scales", torch.float8_e4m3fn), ("scales", torch.int32)),
    ],
)
def test_words_scales_and_groups_of_a_dtype_that_lost_bits_are_refused(tmp_path, end, dtype):
    quantised, _ = write(tmp_path, "gptq", 4, 32)
    path, name = quantised / "model.safetensors", f"model.layers.0.mlp.down_proj.{end}"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].to(dtype)}, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"Tensor '{end}' of .*down_proj.weight' has the dtype {dtype}: write the"):
        load_model(quantised, "w4a32")


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_all_shards_can_be_cut_or_none(rank):
    weight = rounded_to_nearest(torch.randn(8, 128), 4, 64)
    with pytest.raises(InputError, match="split into 4 shards: groups of 64 inputs"):
        Shard(rank, 4, lambda x: x).cut_matrix(weight, (8, 32))


def test_unequal_groups_are_refused(tmp_path):
    quantised, _ = write(tmp_path, "gptq", 4, 32)
    path = quantised / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.down_proj.g_idx"][5] = 2
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"mlp\.down_proj\.weight' don't have 32 inputs each"):
        load_model(quantised, "w4a32")


@pytest.mark.parametrize("dtype", ["fp32", "w8a32"])
def test_a_dtype_with_other_weights_is_refused(tmp_path, dtype):
    quantised, _ = write(tmp_path, "gptq", 4, 32)
    with pytest.raises(InputError, match="weights of 4 bits"):
        load_model(quantised, dtype)


@pytest.mark.parametrize(("bits", "axis"), [(4, 0), (4, 1), (8, 0), (8, 1)])
def test_packing_is_undone(bits, axis):
    codes = torch.randint(0, 2**bits, (24, 32))
    expected = words(codes.t() if axis == 0 else codes, bits)
    assert torch.equal(packed(codes, bits, axis), expected.t() if axis == 0 else expected)
    assert torch.equal(unpacked(packed(codes, bits, axis), bits, axis), codes)


@pytest.mark.parametrize(("bits", "size", "head"), [(8, 32, True), (4, 64, False), (4, -1, False)])
def test_a_quantised_copy_holds_the_nearest_codes(tmp_path, bits, size, head):
    create_model(tmp_path / "m", shards=2, **SIZES)
    done = []
    written = quantize_model(tmp_path / "m", tmp_path / "q", bits, size, head, lambda *at: done.append(at))
    assert done[-1] == (14 + head, 14 + head) and written.bytes < written.original_bytes
    sizes = ModelSpec.from_directory(tmp_path / "q")
    assert sizes.head_dtype == ("w8a16" if head else None)
    assert (sizes.head_saving("w8a32") > 0) == head and sizes.fingerprint == ModelSpec.from_directory(
        tmp_path / "m"
    ).fingerprint
    assert sorted(p.name for p in (tmp_path / "q").iterdir()) == sorted(p.name for p in (tmp_path / "m").iterdir())
    shutil.copytree(tmp_path / "m", tmp_path / "twin")
    for path in sorted((tmp_path / "twin").glob("*.safetensors")):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith("_proj.weight") or (head and name == "lm_head.weight"):
                tensors[name] = rounded_to_nearest(tensor, bits, size if size > 0 else tensor.shape[1]).dequantized()
        save_file(tensors, path, metadata={"format": "pt"})
    dtype = {4: "w4a32", 8: "w8a32"}[bits]
    got, expected = (logits(load_model(tmp_path / name, kind)) for name, kind in (("q", dtype), ("twin", "fp32")))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("arch", "bits", "size", "said"),
    [
        ("llama", 3, 32, "--bits 3"),
        ("llama", 4, 48, "--group-size 48"),
        ("llama", 4, 128, "does not divide the 64 inputs"),
        ("gpt2", 4, 32, "gpt2"),
    ],
)
def test_what_cannot_be_quantised_is_refused_and_nothing_is_written(tmp_path, arch, bits, size, said):
    create_model(tmp_path / "m", arch, **SIZES | ({"kv_heads": None} if arch == "gpt2" else {}))
    with pytest.raises(InputError, match=said):
        quantize_model(tmp_path / "m", tmp_path / "q", bits, size)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    ("value", "said"),
    [(float("nan"), "not finite"), (float("-inf"), "not finite"), (1e7, "up to 1e[+]07, whose scale")],
)
def test_values_without_a_scale_are_not_quantised(tmp_path, value, said):
    create_model(tmp_path / "m", **SIZES)
    path = tmp_path / "m" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=rf"Tensor 'model\.layers\.1\.mlp\.up_proj\.weight' has values .*{said}"):
        quantize_model(tmp_path / "m", tmp_path / "q", 4, 32)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_an_interrupted_copy_leaves_nothing(tmp_path):
    create_model(tmp_path / "m", **SIZES)

    def interrupt(done, total):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(tmp_path / "m", tmp_path / "q", 4, 32, progress=interrupt)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
