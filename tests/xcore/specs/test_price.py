"""Prices by the device-hour, from YAML."""

import pytest

from xcore.errors import InputError
from xcore.specs.cluster import parse_cluster
from xcore.specs.price import price_per_hour, read_prices


def test_a_cluster_costs_what_its_devices_do(tmp_path):
    (tmp_path / "p.yaml").write_text("a40: 0.5\nH100-SXM: 3\n")
    prices = read_prices(tmp_path / "p.yaml")
    assert price_per_hour(prices, parse_cluster("4xA40")) == 2.0
    assert price_per_hour(prices, parse_cluster("2x8xH100-SXM")) == 48.0
    assert price_per_hour({"H100": 3.0}, parse_cluster("2x8xH100")) == 48.0
    with pytest.raises(InputError, match="no price of A100-80GB, only of A100"):
        price_per_hour({"A100": 3.0}, parse_cluster("1xA100-80GB"))
    with pytest.raises(InputError, match="no price of L40S, only of a40, H100-SXM"):
        price_per_hour(prices, parse_cluster("1xL40S"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no prices"),
        ("- 3", "no prices"),
        ("A40: -1", "-1 is not a price of A40"),
        ("A40: 0", "0 is not a price"),
        ("A40: .inf", "inf is not a price"),
        ("A40: cheap", "'cheap' is not a price"),
        ("A40: true", "True is not a price"),
        ("A40: [1", "not valid YAML"),
    ],
)
def test_bad_files_are_refused_in_a_sentence(tmp_path, text, message):
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        read_prices(tmp_path / "p.yaml")
    with pytest.raises(InputError, match="no price file"):
        read_prices(tmp_path / "gone.yaml")
