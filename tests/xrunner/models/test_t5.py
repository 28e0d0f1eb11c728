"""The encoder-decoder against transformers': logits of ragged batches, prompts encoded beside sequences that decode."""

import json
import re

import pytest
import torch

from xcore.errors import InputError
from xcore.specs.model import ModelSpec
from xrunner.models import AttentionBatch, Batch, computed_rows, load_model, random_model
from xrunner.models.create import create_model
from xrunner.models.t5 import relative_buckets

from .conftest import vary_vectors
from .test_shard import sharded

BLOCK = 8
VERSIONS = {
    "1.0": {"feed_forward_proj": "relu", "tie_word_embeddings": True},
    "1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """Two encoder layers and three decoder layers; heads that aren't as wide together as the hidden states."""
    from transformers import T5Config, T5ForConditionalGeneration

    root = tmp_path_factory.mktemp("t5")
    for name, options in VERSIONS.items():
        torch.manual_seed(2)
        sizes = {"num_layers": 2, "num_decoder_layers": 3, "d_model": 36, "num_heads": 4, "d_kv": 10, "d_ff": 50}
        small = {"vocab_size": 301, "relative_attention_num_buckets": 12, "relative_attention_max_distance": 20}
        special = {"decoder_start_token_id": 3, "eos_token_id": 1, "pad_token_id": 0}
        config = T5Config(**sizes, **small, **special, **options, initializer_factor=1.0)
        model = T5ForConditionalGeneration(config)
        with torch.no_grad():
            for layer in [*model.encoder.block, *model.decoder.block]:  # scores that matter: they begin near nought
                layer.layer[0].SelfAttention.q.weight *= 6
        model.save_pretrained(root / name)
        vary_vectors(root / name)
    return {name: root / name for name in VERSIONS}


def theirs(directory):
    from transformers import AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32).eval()


def their_logits(model, prompt, output):
    with torch.inference_mode():
        return model(prompt[None], decoder_input_ids=output[None]).logits[0]


class Sequences:
    """Sequences in shuffled blocks of one cache, encoded and decoded as a runner would."""

    def __init__(self, model, prompts, outputs, blocks=60):
        self.model, self.prompts, self.outputs = model, prompts, outputs
        self.cache = model.new_cache(blocks, BLOCK)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).tolist()
        needs = [-(-(len(p) + len(o)) // BLOCK) for p, o in zip(prompts, outputs, strict=True)]
        self.tables = [[order.pop() for _ in range(need)] for need in needs]
        self.made = [0] * len(prompts)
        self.logits = [[] for _ in prompts]

    def part(self, begin, which, counts, contexts, starts):
        width = max(len(self.tables[i]) for i in which)
        tables = [self.tables[i] + [0] * (width - len(self.tables[i])) for i in which]
        return AttentionBatch(
            begin,
            begin + sum(counts),
            torch.tensor(tables, dtype=torch.int32),
            torch.tensor([0, *counts]).cumsum(0).int(),
            torch.tensor(contexts, dtype=torch.int32),
            starts if starts is None else torch.tensor(starts, dtype=torch.int32),
        )

    def slots(self, which, first, count):
        places = torch.arange(first, first + count)
        return torch.tensor(self.tables[which])[places // BLOCK] * BLOCK + places % BLOCK

    def step(self, encode=(), decode=()):
        inputs = [len(self.prompts[i]) for i in range(len(self.prompts))]
        tokens = [self.prompts[i] for i in encode] + [self.outputs[i][self.made[i]][None] for i in decode]
        slots = [self.slots(i, 0, inputs[i]) for i in encode]
        slots += [self.slots(i, inputs[i] + self.made[i], 1) for i in decode]
        begin = sum(inputs[i] for i in encode)
        parts = [self.part(0, encode, *2 * ([inputs[i] for i in encode],), None)] if encode else []
        if decode:
            contexts = [inputs[i] + self.made[i] + 1 for i in decode]
            parts.append(self.part(begin, decode, [1] * len(decode), contexts, [inputs[i] for i in decode]))
        count = begin + len(decode)
        fill = torch.zeros(computed_rows(count) - count, dtype=torch.int64)
        rows = torch.arange(begin, count)
        flat = torch.cat([*tokens, fill])
        batch = Batch(flat, torch.zeros_like(flat), torch.cat(slots), tuple(parts), rows)
        states = self.forward(batch)[rows]
        assert len(states) == len(decode)
        for i, row in zip(decode, self.model.ends.logits(states), strict=True):
            self.logits[i].append(row)
            self.made[i] += 1

    def forward(self, batch):
        return self.model.forward(batch, self.cache)


def draw(lengths, seed=4):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 301, (n,), generator=g) for n in lengths]


PROMPTS, OUTPUTS = draw((5, 41, 1, 130, 16)), draw((4, 30, 26, 8, 29), 5)


def run(model, of=Sequences):
    """Three prompts at once, two more beside decoding ones; the last iterations decode what is left."""
    all_of = of(model, PROMPTS, OUTPUTS)
    all_of.step(encode=(0, 1, 2))
    for _ in range(3):
        all_of.step(decode=(2, 0, 1))
    all_of.step(encode=(3, 4), decode=(0, 1))
    while left := [i for i in range(5) if all_of.made[i] < len(OUTPUTS[i])]:
        all_of.step(decode=left)
    return [torch.stack(rows) for rows in all_of.logits]


@pytest.mark.parametrize("version", VERSIONS)
def test_logits_are_transformers(versions, version):
    model, other = load_model(versions[version]), theirs(versions[version])
    assert (len(model.encoder), len(model.layers), model.start, model.eos) == (2, 3, (3,), {1})
    for mine, prompt, output in zip(run(model), PROMPTS, OUTPUTS, strict=True):
        expected = their_logits(other, prompt, output)
        assert expected.std() > 0.05
        torch.testing.assert_close(mine, expected, atol=1e-4 * max(1.0, float(expected.std())), rtol=1e-4)


@pytest.mark.parametrize("version", VERSIONS)
def test_shards_together_give_the_whole_models_logits(versions, version):
    unsplit = run(load_model(versions[version]))
    for results in sharded(lambda shard: load_model(versions[version], shard=shard), 2, run):
        for mine, expected in zip(results, unsplit, strict=True):
            torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-4)


def test_bfloat16_follows(versions):
    model = load_model(versions["1.1"], "bf16")
    for mine, expected in zip(run(model), run(load_model(versions["1.1"])), strict=True):
        assert (mine.float() - expected).std() < 0.1 * expected.std()


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (12, 20), (8, 64)])
def test_buckets_are_transformers(both_ways, buckets, most):
    from transformers.models.t5.modeling_t5 import T5Attention

    far = torch.arange(-3 * most, 3 * most + 1)
    expected = T5Attention._relative_position_bucket(far, both_ways, buckets, most)
    assert torch.equal(relative_buckets(most, buckets, both_ways)[far.clamp(-most, most) + most], expected)


@pytest.mark.parametrize("shards", [1, 2])
def test_transformers_reads_what_is_created(tmp_path, shards):
    from transformers import AutoModelForSeq2SeqLM

    sizes = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 301, "context": 128}
    spec = create_model(tmp_path / "m", "t5", shards=shards, **sizes)
    model, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert spec.parameters == sum(p.numel() for p in model.parameters())
    mine = run(load_model(tmp_path / "m"))
    for rows, prompt, output in zip(mine, PROMPTS, OUTPUTS, strict=True):
        expected = their_logits(model, prompt, output)
        torch.testing.assert_close(rows, expected, atol=3e-4, rtol=1e-4)


def edited(directory, tmp_path, **changes):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in directory.iterdir():
        if file.name != "generation_config.json":
            (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return copy


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"feed_forward_proj": "gated-silu"}, "feed_forward_proj = 'gated-silu'"),
        ({"decoder_start_token_id": None, "bos_token_id": None}, "decoder_start_token_id"),
        ({"model_type": "mt5"}, "mt5"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(versions, tmp_path, changes, words):
    with pytest.raises(InputError, match=words):
        load_model(edited(versions["1.0"], tmp_path, **changes))


class Staged(Sequences):
    """The same on stages, each with its own cache, where the encoder's output goes back to those before the last."""

    def __init__(self, stages, prompts, outputs):
        super().__init__(stages[-1], prompts, outputs)
        self.stages = [(stage, stage.new_cache(60, BLOCK)) for stage in stages]

    def forward(self, batch):
        x, prompts = None, batch.attention[0]
        for stage, cache in self.stages:
            x = stage.forward(batch, cache, x)
            assert stage.head or len(x) == len(batch.tokens)
        if prompts.starts is None:
            for stage, cache in self.stages:
                if stage.ends.encoder_norm is None:
                    stage.cache_encoded(x[: prompts.end], batch.slots[: prompts.end], cache)
        return x


def load_stages(directory, cuts, **options):
    """Stages of (encoder layers, decoder layers)."""
    ends = [{"embedding": i == 0, "head": i == len(cuts) - 1} for i in range(len(cuts))]
    return [
        load_model(directory, layers=range(*decoder), encoder_layers=range(*encoder), **end, **options)
        for (encoder, decoder), end in zip(cuts, ends, strict=True)
    ]


CUTS = ((0, 1), (0, 2)), ((1, 2), (2, 3))


@pytest.mark.parametrize("version", VERSIONS)
def test_stages_together_are_the_whole(versions, version):
    stages = load_stages(versions[version], CUTS)
    assert [(len(stage.encoder), len(stage.layers)) for stage in stages] == [(1, 2), (1, 1)]
    for mine, expected in zip(run(stages, Staged), run(load_model(versions[version])), strict=True):
        torch.testing.assert_close(mine, expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("encoder", "decoder", "ends", "words"),
    [
        (range(1), range(0), (True, False), "^(shared|encoder.block.0)"),
        (range(1, 2), range(0), (False, False), "^encoder.(block.1|final)"),
        (range(0), range(1, 3), (False, True), "^(shared|decoder.(block.[12]|final))"),
        (range(1, 2), range(1, 2), (False, False), "^(encoder.(block.1|final)|decoder.block.1)"),
    ],
)
def test_a_stage_reads_its_own_tensors_alone(versions, tmp_path, encoder, decoder, ends, words):
    """Beside the biases, which every stage has."""
    from safetensors.torch import load_file, save_file

    copy = edited(versions["1.0"], tmp_path)
    tensors = load_file(copy / "model.safetensors")
    selected = {name: tensor for name, tensor in tensors.items() if re.search(words + "|bias", name)}
    save_file(selected, copy / "model.safetensors", metadata={"format": "pt"})
    stage = load_model(copy, layers=decoder, encoder_layers=encoder, embedding=ends[0], head=ends[1])
    assert (len(stage.encoder), len(stage.layers), stage.head) == (len(encoder), len(decoder), ends[1])
    assert len(stage.new_cache(2, BLOCK).keys) == max(1, len(decoder))


@pytest.mark.parametrize(
    ("layers", "encoder", "words"),
    [
        (range(0), None, r"has layers\[0:3\]: a stage can't hold layers\[0:0\]"),
        (range(0), range(0), r"has layers\[0:3\]"),
        (range(2, 4), range(1), r"can't hold layers\[2:4\]"),
        (range(3), range(1, 3), r"has encoder layers\[0:2\]: a stage can't hold layers\[1:3\]"),
    ],
)
def test_layers_that_the_model_lacks(versions, layers, encoder, words):
    with pytest.raises(InputError, match=words):
        load_model(versions["1.0"], layers=layers, encoder_layers=encoder)


def test_a_shard_holds_its_share():
    spec = ModelSpec("m", "t5", 3, 64, 4, 4, 16, 96, True, 300, 128, 2)
    from xrunner.models import Shard

    model = random_model(spec, shard=Shard(1, 2, lambda x: x))
    first = model.layers[0]
    products = (first.qkv, first.output, first.cross_query, first.cross_output, first.up, first.down)
    assert [(p.outputs, p.inputs) for p in products] == list(spec.token_matrices(2))
    shape = (first.cross_projection.outputs, first.cross_projection.inputs)
    assert shape == spec.cross_projection(2)
    assert model.new_cache(5, 16).bytes == 5 * 16 * 3 * spec.kv_bytes(2, "fp32")
    assert model.encoder_bias.shape == (2, 257)
