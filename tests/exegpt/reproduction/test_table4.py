"""Table 4: seconds to load weights, by hand."""

import pytest

from exegpt.reproduction import table4


def test_every_device_loads_its_own_weights():
    """Golden: GPT-3 39B in fp16 is 78 GB, 39 GB per node of eight, 4.9 GB per device."""
    row = table4.loading("gpt3-39b", 16, (0.9, 2.1))
    assert row.node_bytes == pytest.approx(39e9, rel=0.01)
    assert row.ssd_s == pytest.approx(39e9 / 8 / 0.87e9, rel=0.01)
    assert row.dram_s == pytest.approx(39e9 / 8 / 19e9, rel=0.02)  # the roofline's link of an A40
    assert row.implied_bytes_s == pytest.approx((43.4e9, 18.6e9), rel=0.01)


def test_the_papers_rows_imply_what_the_specification_says():
    """About 7.4 GB/s per node from SSD in three rows, 32 to 43 GB/s from DRAM in all four."""
    table = table4.reproduce()
    dram, ssd = zip(*(row.implied_bytes_s for row in table.rows), strict=True)
    assert 32e9 < min(dram) < max(dram) < 44e9
    assert ssd[1:] == pytest.approx([7.4e9] * 3, rel=0.05)
    (section,) = table4.sections(table)
    assert section.rows[1][6:9] == ("7.27", "7.1", "+2.4%")
