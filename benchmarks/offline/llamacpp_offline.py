"""llama.cpp on requests of token ids, in a loop of our own over its slots. The setting is the number of slots.

Its environment: `pip install llama-cpp-python gguf`. The model, a Llama, is written as GGUF beside the requests.
"""

import ctypes
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from lines import Work, answer, read_work, timed
from numpy.typing import NDArray

_BATCH = 256
"""Tokens of a batch, at most."""
_KINDS = {"F32": (np.float32, gguf.GGMLQuantizationType.F32), "BF16": (np.uint16, gguf.GGMLQuantizationType.BF16)}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _tensors(path: Path) -> Iterator[tuple[str, str, NDArray[np.float32] | NDArray[np.uint16]]]:
    """Yield name, dtype and values of each tensor of a safetensors file."""
    with path.open("rb") as file:
        (length,) = np.frombuffer(file.read(8), np.uint64)
        header = json.loads(file.read(int(length)))
        start = file.tell()
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            kind = np.dtype(_KINDS[entry["dtype"]][0])
            values = np.fromfile(path, kind, (end - begin) // kind.itemsize, offset=start + begin)
            yield name, entry["dtype"], values.reshape(entry["shape"])


def _converted(work: Work) -> Path:
    """Return the model as GGUF; queries and keys have the pairs of a rotation side by side there."""
    target = Path(sys.argv[2]).with_name("model.gguf")
    if target.is_file():
        return target
    source = Path(work.model)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(target.with_suffix(".part"), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer.add_rope_freq_base(theta)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, dtype, values in _tensors(source / "model.safetensors"):
        layer = name.startswith("model.layers.")
        number, _, own = name.removeprefix("model.layers.").partition(".") if layer else ("", "", name)
        stem = own.removesuffix(".weight")
        if stem in ("self_attn.q_proj", "self_attn.k_proj"):
            turned = values.reshape(heads if stem.endswith("q_proj") else kv_heads, 2, -1, values.shape[1])
            values = np.ascontiguousarray(turned.swapaxes(1, 2)).reshape(values.shape)
        if values.ndim == 1 and dtype == "BF16":  # llama.cpp wants norms in float32
            dtype, values = "F32", (values.astype(np.uint32) << 16).view(np.float32)
        written = values.view(np.uint8) if dtype == "BF16" else values
        title = f"blk.{number}.{_NAMES[stem]}" if layer else _NAMES[stem]
        writer.add_tensor(f"{title}.weight", written, raw_dtype=_KINDS[dtype][1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target.with_suffix(".part").rename(target)


@dataclass
class _Sequence:
    """A request in a slot."""

    prompt: list[int]
    wanted: int
    slot: int = -1
    done: int = 0
    """Tokens of it that are in the cache."""
    output: list[int] = field(default_factory=list)

    @property
    def next_tokens(self) -> list[int]:
        """Tokens that aren't in the cache yet."""
        return [*self.prompt, *self.output][self.done :]


class _Slots:
    """A context of llama.cpp, whose sequences are slots."""

    def __init__(self, work: Work):
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(
            str(_converted(work)).encode(), llama_cpp.llama_model_default_params()
        )
        self._count = int(work.setting)
        options = llama_cpp.llama_context_default_params()
        options.n_seq_max, options.n_batch, options.n_ubatch = self._count, _BATCH, _BATCH
        options.n_ctx, options.kv_unified = self._count * work.longest, True
        options.n_threads = options.n_threads_batch = work.threads
        kind = llama_cpp.GGML_TYPE_F32 if work.kv_dtype == "fp32" else llama_cpp.GGML_TYPE_BF16
        options.type_k = options.type_v = kind
        self._context = llama_cpp.llama_init_from_model(model, options)
        if not self._context:
            raise SystemExit("llama.cpp makes no context of these sizes")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)

    def run(self, prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
        """Fill free slots in order, and decode all of them together with as many prompts' tokens as fit."""
        sequences = [_Sequence(ids, wanted) for ids, wanted in zip(prompts, outputs, strict=True)]
        waiting, running, free = sequences[::-1], list[_Sequence](), [*range(self._count)]
        while waiting or running:
            while waiting and free:
                running.append(waiting.pop())
                running[-1].slot = free.pop()
            self._step(running)
            for sequence in [s for s in running if len(s.output) == s.wanted]:
                running.remove(sequence)
                free.append(sequence.slot)
                llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), sequence.slot, -1, -1)
        return [sequence.output for sequence in sequences]

    def _step(self, running: list[_Sequence]) -> None:
        """Compute one batch, and append its greedy tokens."""
        batch, place, ends = self._batch, 0, []
        for sequence in sorted(running, key=lambda s: not s.output):  # decoding first
            tokens = sequence.next_tokens
            taken = tokens[: _BATCH - place]
            for number, token in enumerate(taken):
                batch.token[place], batch.pos[place] = token, sequence.done + number
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence.slot
                batch.logits[place] = len(taken) == len(tokens) and number == len(taken) - 1
                place += 1
            if taken and len(taken) == len(tokens):
                ends.append((place - 1, sequence))
            sequence.done += len(taken)
        batch.n_tokens = place
        if llama_cpp.llama_decode(self._context, batch):
            raise SystemExit("llama.cpp can't compute a batch")
        for at, sequence in ends:
            logits = llama_cpp.llama_get_logits_ith(self._context, at)
            row = np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self._vocab,))
            sequence.output.append(int(row.argmax()))


def main() -> None:
    """Convert, load and run."""
    work = read_work()
    answer(work, timed(_Slots(work).run))


if __name__ == "__main__":
    main()
