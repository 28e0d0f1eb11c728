"""The shares of the built-in devices are those of the measured kernels."""

import pytest

from benchmarks.device_shares import ENGINES, SYSTEMS, product_shares, table
from xcore.specs.device_sheets import SHEETS
from xprofiler.aiconfigurator import systems_folder


@pytest.mark.slow
@pytest.mark.skipif(systems_folder() is None, reason="aiconfigurator-core is not installed")
@pytest.mark.parametrize("system", ["a100_sxm", "gb300"])
def test_the_sheets_have_the_measured_shares(system):
    sheet = SHEETS[SYSTEMS[system]]
    found = [product_shares(rows, sheet) for engine in ENGINES if (rows := table(system, "gemm", engine, "gemm"))]
    shares = {"bandwidth": sheet.shares.bandwidth, "bf16": sheet.shares.products, "int8": sheet.shares.products8}
    shares["fp4"] = sheet.shares.products4
    for name, share in shares.items():
        measured = sorted(each[name] for each in found if name in each)
        assert not measured or measured[len(measured) // 2] == pytest.approx(share, abs=0.006), name
    assert all("bf16" in each for each in found) and len(found) == len(ENGINES)


def test_a_product_at_the_peak_has_the_share_one():
    import numpy as np

    sheet, size = SHEETS["H100-SXM"], 16_384
    seconds = 2 * size**3 / sheet.device.flops_s["bf16"]
    columns = {name: np.array([value]) for name, value in {"m": size, "n": size, "k": size}.items()}
    columns |= {"gemm_dtype": np.array(["bfloat16"]), "latency": np.array([seconds * 1e3])}
    columns = {name: np.repeat(column, 2) for name, column in columns.items()}
    columns["m"] = np.array([size, 1])
    columns["latency"][1] = 2 * size**2 / sheet.device.bandwidth_bytes_s * 1e3
    assert product_shares(columns, sheet) == pytest.approx({"bf16": 1.0, "bandwidth": 1.0}, abs=0.0)
