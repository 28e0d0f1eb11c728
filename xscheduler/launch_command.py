"""Read a running server's launch command, with vLLM's or SGLang's flags, as the settings to simulate.

A flag that changes the prediction and isn't modelled is an error; flags that change nothing are listed. Flags are those
of `vllm serve` and `python -m sglang.launch_server`, in the releases of `RELEASES`.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from xcore.errors import InputError

Read = Callable[[str], Any]
Number = TypeVar("Number", int, float)

RELEASES = {"vllm": "vLLM 0.33", "sglang": "SGLang 0.5"}
"""Engine releases whose flags and defaults are followed (vllm/engine/arg_utils.py, sglang/srt/server_args.py)."""
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


LAYER_PARTITION = "VLLM_PP_LAYER_PARTITION"
"""The environment variable with the layers of each pipeline stage of vLLM (vllm/envs.py)."""
_DTYPES = {"auto": None, "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
_QUANTIZATIONS = {
    **dict.fromkeys(("fp8", "fbgemm_fp8", "modelopt", "w8a8_fp8"), "fp8"),
    **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin"), "int4"),
    **dict.fromkeys(("modelopt_fp4", "nvfp4"), "nvfp4"),
    "mxfp4": "mxfp4",
    "w8a8_int8": "int8",
    "compressed-tensors": None,
}
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
        "max-running-requests": ("max_num_seqs", _count),
        "chunked-prefill-size": ("max_num_batched_tokens", _count),
        "mem-fraction-static": ("memory_fraction", _share),
        "page-size": ("block_size", _count),
        "context-length": ("longest", _count),
    },
}
"""Flags with a value: the option that each one sets, and the function that reads the value."""
_SWITCHES: dict[str, dict[str, tuple[str, Any]]] = {
    "vllm": {
        "enable-prefix-caching": ("prefix_caching", True),
        "no-enable-prefix-caching": ("prefix_caching", False),
        "enable-chunked-prefill": ("policy", POLICY),
        "enable-expert-parallel": ("expert_parallel", True),
    },
    "sglang": {"disable-radix-cache": ("prefix_caching", False), "enable-mixed-chunk": ("policy", POLICY)},
}
"""Flags without a value."""
_SHORT = {"tp": "tensor-parallel-size", "pp": "pipeline-parallel-size", "dp": "data-parallel-size", "q": "quantization"}
_NAMED = {
    *("host", "port", "api-key", "served-model-name", "tokenizer", "tokenizer-mode", "download-dir", "load-format"),
    *("revision", "seed", "chat-template", "tool-call-parser", "reasoning-parser", "uvicorn-log-level", "log-level"),
    *("node-rank", "nnodes", "master-addr", "master-port", "dist-init-addr", "distributed-executor-backend"),
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
        raise InputError("--command names no model: write `vllm serve MODEL …`.")
    return _launch(engine, found, named)


def _launch(engine: str, found: dict[str, Any], named: list[str]) -> Launch:
    settings = {name: value for name, value in found.items() if value is not None}
    if quantized := settings.pop("quantization", None):
        settings["dtype"] = quantized  # the dtype of the weights; --dtype is then that of activations only
    model, longest, stages = settings.pop("model"), settings.pop("longest", None), settings.pop("stages", 1)
    if len(settings.get("layers", (0,) * stages)) != stages:
        given = ",".join(map(str, settings["layers"]))
        raise InputError(
            f"--command has {LAYER_PARTITION}={given}, but {stages} pipeline stages: write one number for each stage."
        )
    settings.setdefault("tp_degree", 1)
    settings.setdefault("replicas", 1)
    if settings.get("expert_parallel") and settings["replicas"] > 1:  # its replicas share the experts
        settings["attention_dp"] = settings["replicas"]
        del settings["expert_parallel"]
    return Launch(engine, model, settings | {"stages": stages}, tuple(named), longest)


def _engine(words: list[str]) -> tuple[str, list[str], dict[str, Any]]:
    """Return the engine of a command, the remaining words, and the settings from its environment variables."""
    said: dict[str, Any] = {}
    while words and ("=" in words[0] and not words[0].startswith("-")):
        variable, _, value = words.pop(0).partition("=")
        if variable == LAYER_PARTITION:
            _take(said, "layers", _read(variable, value, _counts), variable)
    if words[:2] == ["vllm", "serve"]:
        return "vllm", words[2:], said
    for module, engine in (("vllm.entrypoints.openai.api_server", "vllm"), ("sglang.launch_server", "sglang")):
        if len(words) > 2 and words[0].startswith("python") and words[1] == "-m" and words[2] == module:
            return engine, words[3:], said
    raise InputError(
        f"--command '{' '.join(words[:3])} …' is not a command of vLLM or SGLang: begin it with `vllm serve` or "
        "`python -m sglang.launch_server`."
    )


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


def _take(found: dict[str, Any], name: str, value: Any, what: str) -> None:
    if name in found and found[name] != value and None not in (found[name], value):
        raise InputError(f"--command sets {what} twice, to {found[name]} and to {value}: leave one of them out.")
    found[name] = value if value is not None else found.get(name)


def _read(flag: str, text: str, read: Read) -> Any:
    try:
        return read(text)
    except ValueError as error:
        raise InputError(f"--command has --{flag} {text}, which isn't {error}.") from None
