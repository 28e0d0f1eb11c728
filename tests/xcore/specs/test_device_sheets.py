"""The built-in devices beside the collected data sheets, and what is said of figures that were not measured."""

import csv
from dataclasses import replace

import pytest

from tests.public_data import needs_data
from xcore.document import from_dict, to_dict
from xcore.specs.cluster import ClusterSpec, is_stock, parse_cluster
from xcore.specs.device_names import device_kind
from xcore.specs.device_sheets import KINDS, SHEETS

EARLIER = (
    "A40",
    "A100-40GB",
    "A100-80GB",
    "A800-80GB",
    "H100-SXM",
    "H200-SXM",
    "L40S",
    "B200",
    "RTX4090",
    "RTXPRO6000",
)
"""The kinds of the first schedules and profiles."""
RATES = ("fp32_flops_s", "fp16_flops_s", "bf16_flops_s", "fp8_flops_s", "fp4_flops_s", "int8_ops_s")
FITTED = {("B200-SXM", "bandwidth_bytes_s"): 8.0e12}
"""Figures to which constants were fitted before these sheets were collected: of another sheet of the maker."""


def test_every_collected_sheet_is_built_in_with_its_figures():
    rows = list(csv.DictReader(needs_data("devices.csv").open(encoding="utf-8")))
    kinds = [device_kind(row["kind"]).kind for row in rows]
    assert sorted(kinds) == sorted(KINDS)
    for row, sheet in zip(rows, map(SHEETS.__getitem__, kinds), strict=True):
        device, dies = sheet.device, sheet.dies
        figures = {name: dies * device.flops_s.get(name.split("_")[0], 0.0) for name in RATES}
        figures |= {name: dies * getattr(device, name) for name in ("memory_bytes", "bandwidth_bytes_s")}
        figures["link_bytes_s_per_direction"] = sheet.link_gb_s * 1e9
        for name, figure in figures.items():
            known = FITTED.get((row["kind"], name), float(row[name] or 0))
            assert figure == pytest.approx(known, rel=6e-4), (row["kind"], name)  # 989 and 989.5 TFLOP/s
        assert sheet.checked == row["checked"]


def test_the_two_dies_of_an_mi250x_are_two_devices():
    whole, die = SHEETS["MI250X"], device_kind("MI250X")
    assert (2 * die.memory_bytes, 2 * die.flops_s["bf16"]) == (whole.mib * 2**20, 383e12)
    assert die.visible_bytes < die.memory_bytes == 64 * 2**30


@pytest.mark.parametrize("kind", KINDS)
def test_figures_that_are_taken_over_name_a_measured_kind(kind):
    sheet = SHEETS[kind]
    for origin in (sheet.shares.measured_on, sheet.link.measured_on):
        for name in origin.replace(" and ", ", ").split(", "):
            assert kind == name or name in SHEETS
            texts = [text for text in sheet.not_compared if origin in text]
            assert bool(texts) == (kind not in origin.split(", "))
    assert ("data sheet" in "".join(sheet.not_compared)) == (sheet.checked == "memory")


def test_only_measured_devices_have_nothing_to_say():
    silent = [kind for kind in KINDS if not SHEETS[kind].not_compared]
    assert silent == [
        *("A40", "A100-40GB", "A100-80GB", "H100-SXM", "H200-SXM", "L40S", "B200", "RTXPRO6000-Server"),
        *("B300-SXM", "GB200", "GB300"),
    ]


@pytest.mark.parametrize("kind", EARLIER)
def test_a_cluster_of_an_earlier_file_is_read_as_it_stands_and_is_stock(kind):
    """Those files lack the rates in int8 and 4 bits, and have the memory as it was sold."""
    now = parse_cluster(f"8x{kind}")
    document = to_dict(now)
    device = document["device"]
    for dtype in ("int8", "fp4"):
        device["flops_s"].pop(dtype, None)
        device["flops_fractions"].pop(dtype, None)
    device["memory_bytes"] = 48 * 2.0**30
    then = from_dict(ClusterSpec, document, "it")
    assert then.device.memory_bytes == 48 * 2**30 and "int8" not in then.device.flops_s
    assert is_stock(then) and is_stock(now)
    faster = replace(then.device, flops_s={dtype: 1.01 * rate for dtype, rate in then.device.flops_s.items()})
    assert not is_stock(replace(then, device=faster))
    assert not is_stock(replace(now, device=replace(now.device, flops_s={"fp64": 1e12})))
    assert not is_stock(replace(then, intra=replace(then.intra, latency_s=1e-3)))


def test_a_mesh_reaches_more_among_more_devices():
    link = parse_cluster("8xMI300X").intra
    assert link.reached_bytes_s(8) == pytest.approx(7 * link.reached_bytes_s(2))
    assert link.reached_bytes_s(8) < 448e9
