"""Read a running server's launch command, with the flags of its engine, as the settings to simulate.

A flag that changes the prediction and isn't modelled is an error; flags that change nothing are listed. Flags are those
of `vllm serve`, `python -m sglang.launch_server` and `trtllm-serve`, in the releases of `RELEASES`.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from xcore.errors import InputError
from xscheduler.exports.speculative_flags import one_branch, sglang_settings, vllm_settings
from xscheduler.trtllm_config import config_words

Read = Callable[[str], object]
Number = TypeVar("Number", int, float)

RELEASES = {"vllm": "vLLM 0.33", "sglang": "SGLang 0.5", "tensorrt-llm": "TensorRT-LLM 1.2"}
"""Engine releases whose flags and defaults are followed.

vllm/engine/arg_utils.py, sglang/srt/server_args.py, tensorrt_llm/commands/serve.py and tensorrt_llm/llmapi/llm_args.py.
"""
POLICY = "chunked"
"""The only policy that these servers run."""


@dataclass(frozen=True)
class Launch:
    """The content of a launch command."""

    engine: str
    model: str
    settings: Mapping[str, Any]
    """The settings by the names of `simulate`'s options."""
    unmodelled: tuple[str, ...]
    """Flags that don't change a prediction."""
    longest: int | None = None
    """Tokens of the longest request that the server accepts."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on parts of the command, or missing parts, that the simulation doesn't model."""
        notes = [f"flags that do not change this prediction: {', '.join(self.unmodelled)}"] if self.unmodelled else []
        if self.engine == "sglang" and "policy" not in self.settings:
            notes.append(
                "sglang: without --enable-mixed-chunk, prefill and decode take turns; the simulation runs them in "
                "one iteration, as with this flag"
            )
        if self.engine == "tensorrt-llm" and "policy" not in self.settings:
            notes.append(
                "tensorrt-llm: without enable_chunked_prefill, an iteration has whole prompts only; the simulation "
                "splits them, as with this key"
            )
        return tuple(notes)


def _parsed(kind: type[Number], text: str) -> Number:
    """Parse a number; return 0, which no flag accepts, if the text is none."""
    try:
        return kind(text)
    except ValueError:
        return kind(0)


def _count(text: str) -> int:
    count = _parsed(int, text)
    if count < 1:
        raise ValueError("a whole number above 0")
    return count


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(_parsed(int, part) for part in text.split(","))
    if min(counts) < 1:
        raise ValueError("whole numbers above 0, separated by commas")
    return counts


def _share(text: str) -> float:
    share = _parsed(float, text)
    if not 0 < share <= 1:
        raise ValueError("a share above 0 and at most 1")
    return share


LAYER_PARTITIONS = {"vllm": "VLLM_PP_LAYER_PARTITION", "sglang": "SGLANG_PP_LAYER_PARTITION"}
"""The environment variable with the layers of each pipeline stage (vllm/envs.py, sglang/srt/distributed/utils.py)."""
MAX_PREFILL_TOKENS = 16384
"""SGLang's default of `--max-prefill-tokens`."""
_DTYPES = {"auto": None, "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
_QUANTIZATIONS = {
    **dict.fromkeys(("fp8", "fbgemm_fp8", "modelopt", "w8a8_fp8"), "fp8"),
    **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin"), "int4"),
    **dict.fromkeys(("modelopt_fp4", "nvfp4"), "nvfp4"),
    "mxfp4": "mxfp4",
    "w8a8_int8": "int8",
    "compressed-tensors": None,
}
_ADMISSIONS = {"GUARANTEED_NO_EVICT": "reserve", "MAX_UTILIZATION": "grow"}
_KV_DTYPES = {"auto": None, "bfloat16": "bf16", "float16": "fp16", "fp8": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}


def _one_of(known: Mapping[str, str | None]) -> Read:
    def read(text: str) -> str | None:
        if text not in known:
            raise ValueError(f"one of {', '.join(known)}")
        return known[text]

    return read


_SHARED: dict[str, tuple[str, Read]] = {
    "dtype": ("dtype", _one_of(_DTYPES)),
    "quantization": ("quantization", _one_of(_QUANTIZATIONS)),
    "kv-cache-dtype": ("kv_dtype", _one_of(_KV_DTYPES)),
}
_VALUES: dict[str, dict[str, tuple[str, Read]]] = {
    "vllm": _SHARED
    | {
        "model": ("model", str),
        "tensor-parallel-size": ("tp_degree", _count),
        "pipeline-parallel-size": ("stages", _count),
        "data-parallel-size": ("replicas", _count),
        "max-num-seqs": ("max_num_seqs", _count),
        "max-num-batched-tokens": ("max_num_batched_tokens", _count),
        "gpu-memory-utilization": ("memory_fraction", _share),
        "block-size": ("block_size", _count),
        "num-gpu-blocks-override": ("kv_blocks", _count),
        "speculative-config": ("speculative", vllm_settings),
        "max-model-len": ("longest", _count),
    },
    "sglang": _SHARED
    | {
        "model-path": ("model", str),
        "model": ("model", str),
        "tp-size": ("tp_degree", _count),
        "tensor-parallel-size": ("tp_degree", _count),
        "tp": ("tp_degree", _count),
        "pp-size": ("stages", _count),
        "dp-size": ("replicas", _count),
        "data-parallel-size": ("replicas", _count),
        "attn-dp-size": ("attention_dp", _count),
        "attention-data-parallel-size": ("attention_dp", _count),
        "ep-size": ("expert_ranks", _count),
        "expert-parallel-size": ("expert_ranks", _count),
        "ep": ("expert_ranks", _count),
        "max-running-requests": ("max_num_seqs", _count),
        "chunked-prefill-size": ("max_num_batched_tokens", _count),
        "max-prefill-tokens": ("max_prefill_tokens", _count),
        "mem-fraction-static": ("memory_fraction", _share),
        "page-size": ("block_size", _count),
        "context-length": ("longest", _count),
        "speculative-algorithm": ("speculative_algorithm", str),
        "speculative-num-steps": ("speculative_steps", _count),
        "speculative-num-draft-tokens": ("speculative_verified", _count),
        "speculative-draft-model-path": ("speculative_path", str),
        "speculative-eagle-topk": ("speculative_branches", one_branch),
    },
    "tensorrt-llm": {
        "dtype": ("dtype", _one_of(_DTYPES)),
        "tensor-parallel-size": ("tp_degree", _count),
        "tp-size": ("tp_degree", _count),
        "pipeline-parallel-size": ("stages", _count),
        "pp-size": ("stages", _count),
        "pp-partition": ("layers", _counts),
        "moe-expert-parallel-size": ("expert_ranks", _count),
        "ep-size": ("expert_ranks", _count),
        "max-batch-size": ("max_num_seqs", _count),
        "max-num-tokens": ("max_num_batched_tokens", _count),
        "max-seq-len": ("longest", _count),
        "free-gpu-memory-fraction": ("memory_fraction", _share),
        "kv-cache-free-gpu-memory-fraction": ("memory_fraction", _share),
        "kv-cache-config.free-gpu-memory-fraction": ("memory_fraction", _share),
        "kv-cache-config.dtype": ("kv_dtype", _one_of(_KV_DTYPES)),
        "kv-cache-config.tokens-per-block": ("block_size", _count),
        "scheduler-config.capacity-scheduler-policy": ("admission", _one_of(_ADMISSIONS)),
    },
}
"""Flags with a value: the option that each one sets, and the function that reads the value.

The keys of TensorRT-LLM's file are flags here too, with a full stop for a key inside another.
"""
_SWITCHES: dict[str, dict[str, tuple[str, object]]] = {
    "vllm": {
        "enable-prefix-caching": ("prefix_caching", True),
        "no-enable-prefix-caching": ("prefix_caching", False),
        "enable-chunked-prefill": ("policy", POLICY),
        "enable-expert-parallel": ("expert_parallel", True),
    },
    "sglang": {
        "disable-radix-cache": ("prefix_caching", False),
        "enable-mixed-chunk": ("policy", POLICY),
        "enable-dp-attention": ("replicas_share", True),
    },
    "tensorrt-llm": {
        "enable-chunked-prefill": ("policy", POLICY),
        "no-enable-chunked-prefill": ("policy", None),
        "enable-attention-dp": ("attention_dp", True),
        "no-enable-attention-dp": ("attention_dp", None),
        "kv-cache-config.enable-block-reuse": ("prefix_caching", True),
        "no-kv-cache-config.enable-block-reuse": ("prefix_caching", False),
    },
}
"""Flags without a value."""
_WITH_MODEL = {
    "vllm": "vllm serve MODEL",
    "sglang": "sglang serve --model-path MODEL",
    "tensorrt-llm": "trtllm-serve MODEL",
}
"""How each command begins."""
_SHORT = {"tp": "tensor-parallel-size", "pp": "pipeline-parallel-size", "dp": "data-parallel-size", "q": "quantization"}
_NAMED = {
    *("host", "port", "api-key", "served-model-name", "tokenizer", "tokenizer-mode", "download-dir", "load-format"),
    *("revision", "seed", "chat-template", "tool-call-parser", "reasoning-parser", "uvicorn-log-level", "log-level"),
    *("node-rank", "nnodes", "master-addr", "master-port", "dist-init-addr", "distributed-executor-backend"),
    *("gpus-per-node", "backend", "reasoning-parser", "tool-parser"),
    *("allowed-origins", "root-path", "ssl-keyfile", "ssl-certfile", "max-log-len", "swap-space", "random-seed"),
}
"""Flags with a value that don't change a prediction."""
_NAMED_SWITCHES = {
    *("trust-remote-code", "headless", "disable-log-requests", "no-enable-log-requests", "enable-log-requests"),
    *("disable-log-stats", "enable-auto-tool-choice", "enable-metrics", "async-scheduling", "skip-tokenizer-init"),
}


def read_launch(command: str) -> Launch:
    """Read a launch command.

    Raises InputError for a command that isn't vLLM's or SGLang's, or that uses a feature that isn't modelled.
    """
    try:
        words = shlex.split(command.replace("\\\n", " "))
    except ValueError as error:
        raise InputError(f"--command can't be read ({error}): close its quotes.") from None
    engine, rest, found = _engine(words)
    named: list[str] = []
    for flag, value in _flags(engine, rest):
        if flag is None:
            _take(found, "model", value, "the model")
        elif flag in _SWITCHES[engine]:
            name, setting = _SWITCHES[engine][flag]
            _take(found, name, setting, f"--{flag}")
        elif flag in _VALUES[engine]:
            name, read = _VALUES[engine][flag]
            _take(found, name, _read(flag, value, read), f"--{flag}")
        else:
            named.append(f"--{flag}")
    if "model" not in found:
        raise InputError(f"--command names no model: write `{_WITH_MODEL[engine]} …`.")
    return _launch(engine, found, named)


def _launch(engine: str, found: dict[str, Any], named: list[str]) -> Launch:
    settings = {name: value for name, value in found.items() if value is not None}
    if quantized := settings.pop("quantization", None):
        settings["dtype"] = quantized  # the dtype of the weights; --dtype is then that of activations only
    model, longest, stages = settings.pop("model"), settings.pop("longest", None), settings.pop("stages", 1)
    if len(settings.get("layers", (0,) * stages)) != stages:
        given = ",".join(map(str, settings["layers"]))
        name = LAYER_PARTITIONS.get(engine, "pp_partition")
        raise InputError(
            f"--command has {name}={given}, but {stages} pipeline stages: write one number for each stage."
        )
    settings |= settings.pop("speculative", {})
    settings.setdefault("tp_degree", 1)
    settings.setdefault("replicas", 1)
    if engine == "sglang":
        settings |= sglang_settings(settings)
        _size_replicas(settings)
    elif engine == "tensorrt-llm":
        if settings.get("attention_dp"):
            settings["attention_dp"] = settings["tp_degree"]
        _divide_group(settings, limits=False)
    elif settings.get("expert_parallel") and settings["replicas"] > 1:  # its replicas share the experts
        settings["attention_dp"] = settings["replicas"]
        del settings["expert_parallel"]
    return Launch(engine, model, settings | {"stages": stages}, tuple(named), longest)


def _size_replicas(settings: dict[str, Any]) -> None:
    """Turn SGLang's sizes of whole groups into those of each replica.

    `--attn-dp-size N`, once `--dp-size N --enable-dp-attention`, divides a group of `--tp-size` devices among N
    replicas that share the experts; its limits are those of all of them together. A chunk is never larger than
    `--max-prefill-tokens`, which is each replica's.
    """
    _divide_group(settings)
    prefill = settings.pop("max_prefill_tokens", MAX_PREFILL_TOKENS)
    if "max_num_batched_tokens" in settings:
        settings["max_num_batched_tokens"] = min(prefill, settings["max_num_batched_tokens"])


def _divide_group(settings: dict[str, Any], limits: bool = True) -> None:
    """Turn the devices of a group whose replicas share experts into those of a replica, and its `limits` too."""
    shared = settings.pop("attention_dp", 1)
    if settings.pop("replicas_share", False) and shared == 1:
        shared, settings["replicas"] = settings["replicas"], 1
    ranks, devices = settings.pop("expert_ranks", 1), settings["tp_degree"]
    if devices % shared:
        raise InputError(
            f"--command divides {devices} devices (the tensor-parallel size) among {shared} replicas with attention of "
            "their own: use a number that divides them."
        )
    if ranks not in (1, devices):
        raise InputError(
            f"--command has an expert-parallel size of {ranks} on {devices} devices, but experts are simulated only as "
            f"whole ones or as parts on all devices: use 1 or {devices}."
        )
    if shared == 1:
        settings |= {"expert_parallel": True} if ranks > 1 else {}
        return
    if ranks == 1:
        raise InputError(
            f"--command shares experts among {shared} replicas without an expert-parallel size, so that each device "
            f"has a part of every expert, which isn't modelled: add the size {devices}."
        )
    settings |= {"attention_dp": shared, "tp_degree": devices // shared, "replicas": shared * settings["replicas"]}
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if limits and name in settings:
            settings[name] = max(1, settings[name] // shared)


def _engine(words: list[str]) -> tuple[str, list[str], dict[str, Any]]:
    """Return the engine of a command, the remaining words, and the settings from its environment variables."""
    variables: dict[str, str] = {}
    while words and ("=" in words[0] and not words[0].startswith("-")):
        variable, _, value = words.pop(0).partition("=")
        variables[variable] = value
    engine, rest = _engine_of(words)
    variable = LAYER_PARTITIONS.get(engine, "")
    layers = {"layers": _read(variable, variables[variable], _counts)} if variable in variables else {}
    return engine, rest, layers


def _engine_of(words: list[str]) -> tuple[str, list[str]]:
    """Return the engine of a command without environment variables, and the words after the program."""
    if words[:2] in (["vllm", "serve"], ["sglang", "serve"]):
        return words[0], words[2:]
    if "trtllm-serve" in words:  # mpirun and trtllm-llmapi-launch come before it
        return "tensorrt-llm", _with_file(words[words.index("trtllm-serve") + 1 :])
    for module, engine in (("vllm.entrypoints.openai.api_server", "vllm"), ("sglang.launch_server", "sglang")):
        if len(words) > 2 and words[0].startswith("python") and words[1] == "-m" and words[2] == module:
            return engine, words[3:]
    raise InputError(
        f"--command '{' '.join(words[:3])} …' is not a command of vLLM, SGLang or TensorRT-LLM: begin it with `vllm "
        "serve`, `sglang serve`, `python -m sglang.launch_server` or `trtllm-serve`."
    )


def _with_file(words: list[str]) -> list[str]:
    """Return the words of `trtllm-serve` with the keys of its configuration file in the file's place."""
    rest: list[str] = []
    left = list(words[1:] if words[:1] == ["serve"] else words)
    while left:
        word = left.pop(0)
        flag, equals, path = word.partition("=")
        if flag in ("--config", "--extra_llm_api_options") and (equals or left):
            rest += config_words(path if equals else left.pop(0))
        else:
            rest.append(word)
    return rest


def _flags(engine: str, words: list[str]) -> Iterator[tuple[str | None, str]]:
    """Yield the flags without dashes, with their values; None for a word that belongs to no flag.

    Raises InputError for a flag that isn't modelled.
    """
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            yield None, word
            continue
        flag, equals, value = word.lstrip("-").partition("=")
        flag = flag.replace("_", "-")
        flag = _SHORT.get(flag, flag) if not word.startswith("--") else flag
        if flag in _SWITCHES[engine] or flag in _NAMED_SWITCHES:
            if equals:
                raise InputError(
                    f"--command has {word}, but --{flag} takes no value: write the flag alone, or leave it out."
                )
            yield flag, ""
        elif flag in _VALUES[engine] or flag in _NAMED:
            if not equals and not rest:
                raise InputError(
                    f"--command ends with {word}, but this flag needs a value: add the value, or leave the flag out."
                )
            yield flag, value if equals else rest.pop(0)
        else:
            raise InputError(
                f"--command has {word}, which is not modelled for {RELEASES[engine]} and may change the server's "
                "performance: leave it out to simulate the server without it."
            )


def _take(found: dict[str, Any], name: str, value: object, what: str) -> None:
    if name in found and found[name] != value and None not in (found[name], value):
        raise InputError(f"--command sets {what} twice, to {found[name]} and to {value}: leave one of them out.")
    found[name] = value if value is not None else found.get(name)


def _read(flag: str, text: str, read: Read) -> object:
    try:
        return read(text)
    except ValueError as error:
        raise InputError(f"--command has --{flag} {text}, which isn't {error}.") from None
