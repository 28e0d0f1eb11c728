"""Facts about published kernel tables, beside the tables where their package is installed."""

from collections import defaultdict

import pytest

from xcore.specs.builtin_models import HUB_IDS, builtin_model
from xcore.specs.device_sheets import KINDS
from xcore.specs.engine_spec import ENGINES
from xprofiler import aiconfigurator
from xprofiler.attention_tables import attention_tables
from xprofiler.heads import table_for
from xprofiler.kernel_tables import KERNELS, TABLES, KernelTables, tables_for
from xprofiler.operator_tables import OperatorTables

installed = pytest.mark.skipif(aiconfigurator.systems_folder() is None, reason="the package is not installed")
DECODERS = [model for model in map(builtin_model, HUB_IDS) if not model.encoder_layers]


def test_tables_are_of_built_in_devices_and_known_engines():
    assert {tables.device for tables in TABLES} <= set(KINDS) and set(KERNELS) <= set(ENGINES)
    assert {tables.kernels for tables in TABLES} == set(aiconfigurator.ENGINES)
    assert len({(tables.system, tables.kernels) for tables in TABLES}) == len(TABLES)


def test_an_engine_has_the_tables_of_its_own_kernels():
    assert tables_for("H100-SXM", "tensorrt-llm").kernels == "trtllm"
    assert tables_for("H100-SXM", "vllm-0.11") == tables_for("H100-SXM", "vllm")
    for device, engine in (
        ("A40", "vllm"),
        ("H100-SXM", "exegpt"),
        ("H100-SXM", "none"),
        ("A100-80GB", "tensorrt-llm"),
    ):
        assert tables_for(device, engine) is None


def test_dtypes_and_head_sizes_that_were_not_measured_are_not_covered():
    llama, a100, h100 = builtin_model("llama-3.1-8b"), tables_for("A100-80GB", "vllm"), tables_for("H100-SXM", "vllm")
    assert a100.cover(llama, "bf16", "bf16") and h100.cover(llama, "fp8", "fp8") and h100.cover(llama, "fp16", "fp16")
    assert not a100.cover(llama, "bf16", "fp8") and not a100.cover(llama, "fp8", "bf16")
    assert not h100.cover(llama, "fp32", "fp32")
    assert not h100.cover(builtin_model("opt-2.7b"), "bf16", "bf16")  # 80 wide
    assert not h100.cover(builtin_model("t5-11b"), "bf16", "bf16")


@pytest.mark.slow
@installed
@pytest.mark.parametrize("facts", TABLES, ids=lambda facts: f"{facts.system}-{facts.kernels}")
def test_the_package_has_what_the_facts_say(facts):
    tables = OperatorTables(aiconfigurator.systems_folder() / "data" / facts.system, facts.kernels)
    reduce = aiconfigurator._collective(tables.columns("comm", "custom_allreduce"))
    assert (1, *sorted(reduce)) == KernelTables.DEGREES
    products = set(tables.columns("gemm", "gemm")["gemm_dtype"])
    assert {"bfloat16"} | ({"fp8"} if "fp8" in facts.dtypes else set()) <= products
    shapes = defaultdict(set)
    for model in DECODERS:
        degrees = [tp for tp in model.tp_degrees(8) if tp in KernelTables.DEGREES]
        shapes[model.head_size] |= {(model.heads // tp, -(-model.kv_heads // tp)) for tp in degrees}
    for dtype, sizes in (("bfloat16", facts.head_sizes), ("fp8", facts.head_sizes_kv8)):
        for size in sizes:
            for phase in ("context", "generation"):
                measured = attention_tables(tables, phase, size, dtype)
                for heads, kv_heads in shapes[size]:
                    assert table_for(measured, heads, kv_heads)
