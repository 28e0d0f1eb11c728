"""Rings beside NCCL's all-reduces: what is fitted, by which rule, and the errors on both boards."""

import numpy as np
import pytest

from benchmarks.pcie_all_reduce import BOARDS, Row, earlier_rows, errors, fit, nccl_rows, parted
from xcore.specs.cluster import parse_cluster
from xprofiler.aiconfigurator import systems_folder
from xprofiler.rings import PROTOCOLS

installed = pytest.mark.skipif(systems_folder() is None, reason="the package aiconfigurator is not installed")


def test_a_fifth_of_the_rows_is_fitted_by_a_rule_that_ignores_their_order_and_times():
    rows = [Row("l40s", devices, 2**i, float(i)) for devices in (2, 4) for i in range(10)]
    fitted, held_out = parted(rows)
    assert (len(fitted), len(held_out)) == (4, 16)
    assert parted(rows[::-1]) == (fitted, held_out)
    assert not set(fitted) & set(held_out)


@installed
def test_constants_are_those_of_the_fifth_that_was_fitted():
    boards, protocols = fit(parted(nccl_rows())[0])
    for system, rates in BOARDS.items():
        assert np.array(boards[system]) == pytest.approx(np.array(rates), rel=0.01)
    for fitted, built_in in zip(protocols, PROTOCOLS, strict=True):
        assert (fitted.first_s, fitted.step_s) == pytest.approx((built_in.first_s, built_in.step_s), rel=0.03)


@installed
@pytest.mark.parametrize("system", BOARDS)
def test_half_of_the_rows_of_either_board_are_within_15_percent_at_each_number_of_devices(system):
    rows = [row for row in nccl_rows() if row.system == system]
    assert len(rows) == 63
    for devices in (2, 4, 8):
        among = [row for row in rows if row.devices == devices]
        assert np.median(abs(errors(among, BOARDS))) < 0.15
    held_out = [row for row in parted(nccl_rows())[1] if row.system == system]
    assert np.median(abs(errors(held_out, BOARDS))) < 0.15


@installed
def test_the_built_in_pair_of_rtx_pro_6000_is_the_board_of_vllm_0_19():
    _, held_out = parted(earlier_rows())
    ring = parse_cluster("2xRTXPRO6000").intra.ring_bytes_s
    assert np.median(abs(errors(held_out, {"rtx_pro_6000_server": ring}))) < 0.1
