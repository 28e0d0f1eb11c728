"""The errors of rooflines against published measurements: facts, by engine, device and tensor-parallel degree."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RooflineErrors:
    """The errors of one quantity, engine, device and degree, over rows to which no constant was fitted."""

    quantity: str
    """The compared quantity, as answers name it."""
    engine: str
    load: str
    """How the measured requests arrived."""
    device: str
    tp: int
    rows: int
    median_error: float
    """Median of |predicted - published| / published."""
    beyond_quarter: float
    """Share of the rows with an error of more than a quarter."""
    imported_error: float
    """The median error of the same rows with imported kernels instead of the data sheet."""


SOURCES = {
    "tensorrt-llm": "TensorRT-LLM's published throughputs",
    "vllm": "vLLM's rows of Llama-3.1-70B in fp8 in aiconfigurator",
}
"""The source of an engine's rows. TensorRT-LLM: perf-overview.md of versions 0.14 to 1.2 in its repository
(Apache-2.0), dense models in 16 and 8 bits at maximum load: `python -m benchmarks.published --facts`. vLLM:
silicon_sample.csv of aiconfigurator-core 0.12.0 (Apache-2.0): `python -m benchmarks.vllm_terms --facts`. Imported
kernels are those of `exegpt profile import aiconfigurator`, with the same engine."""


@dataclass(frozen=True)
class Limit:
    """A known limit of an engine's predictions, on one device or on all (None)."""

    engine: str | None
    device: str | None
    text: str


LIMITS = (
    Limit("vllm", "A100-80GB", "the time per token is about 9 % too short"),
    Limit("vllm", None, "decoding attention without grouped queries is too slow, 24 % at 80 sequences"),
    Limit(
        "vllm", None, "the 99th percentile of the time to first token near saturation is wrong by a factor of up to 1.8"
    ),
    Limit(None, "L40S", "all-reduces depend on the board: one has 5.3 and 1.5 GB/s among 4 and 8 GPUs, not 18 and 17"),
    *(
        Limit(None, kind, "all-reduces depend on the board: one has 37, 27 and 22 GB/s among 2, 4 and 8, not 14.6")
        for kind in ("RTXPRO6000", "RTXPRO6000-Server")
    ),
    Limit(
        None,
        "MI300X",
        "of eight under vLLM 0.10, latencies are 21 % too short to 39 % too long, and the throughput of thousands of "
        "sequences is 62 % too high",
    ),
)
"""Known limits, from one comparison with 34 published runs of vLLM 0.15 in an open loop.

Boards: `python -m benchmarks.pcie_all_reduce`. MI300X: `python -m benchmarks.published_others`.
"""
_LOOP = ("time per token", "vllm", "4 to 64 clients in a closed loop")
_FULL = ("throughput", "tensorrt-llm", "all requests queued at once")
COMPARED = (
    RooflineErrors(*_FULL, "A100-80GB", 1, 18, 0.054, 0.0, 0.219),
    RooflineErrors(*_FULL, "A100-80GB", 2, 7, 0.113, 0.0, 0.109),
    RooflineErrors(*_FULL, "A100-80GB", 4, 8, 0.104, 0.125, 0.182),
    RooflineErrors(*_FULL, "A100-80GB", 8, 9, 0.107, 0.222, 0.172),
    RooflineErrors(*_FULL, "H100-SXM", 1, 51, 0.047, 0.098, 0.068),
    RooflineErrors(*_FULL, "H100-SXM", 2, 26, 0.047, 0.0, 0.04),
    RooflineErrors(*_FULL, "H100-SXM", 4, 21, 0.065, 0.095, 0.072),
    RooflineErrors(*_FULL, "H100-SXM", 8, 29, 0.089, 0.103, 0.049),
    RooflineErrors(*_FULL, "H200-SXM", 1, 53, 0.034, 0.019, 0.046),
    RooflineErrors(*_FULL, "H200-SXM", 2, 13, 0.049, 0.0, 0.066),
    RooflineErrors(*_FULL, "H200-SXM", 4, 17, 0.061, 0.059, 0.052),
    RooflineErrors(*_FULL, "H200-SXM", 8, 36, 0.058, 0.028, 0.047),
    RooflineErrors(*_FULL, "L40S", 1, 19, 0.074, 0.0, 0.041),
    RooflineErrors(*_FULL, "L40S", 4, 11, 0.049, 0.0, 0.535),
    RooflineErrors(*_FULL, "L40S", 8, 7, 0.039, 0.143, 0.856),
    RooflineErrors(*_LOOP, "B200", 1, 13, 0.066, 0.0, 0.048),
    RooflineErrors(*_LOOP, "B200", 2, 12, 0.019, 0.0, 0.226),
    RooflineErrors(*_LOOP, "B200", 4, 12, 0.033, 0.0, 0.124),
    RooflineErrors(*_LOOP, "B200", 8, 11, 0.051, 0.0, 0.174),
    RooflineErrors(*_LOOP, "H100-SXM", 2, 14, 0.024, 0.0, 0.039),
    RooflineErrors(*_LOOP, "H100-SXM", 4, 9, 0.03, 0.0, 0.041),
    RooflineErrors(*_LOOP, "H100-SXM", 8, 11, 0.044, 0.0, 0.054),
    RooflineErrors(*_LOOP, "H200-SXM", 1, 11, 0.014, 0.0, 0.066),
    RooflineErrors(*_LOOP, "H200-SXM", 2, 12, 0.029, 0.0, 0.04),
    RooflineErrors(*_LOOP, "H200-SXM", 4, 13, 0.046, 0.0, 0.021),
    RooflineErrors(*_LOOP, "H200-SXM", 8, 14, 0.047, 0.0, 0.02),
)
