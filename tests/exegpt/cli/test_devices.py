"""`tune --devices`: how many of which GPU, by price or by number, and what can't be asked together."""

import json

import pytest

from tests.exegpt.cli.test_bad_inputs import check_refused

ASKED = ("tune", "-m", "opt-1.3b", "-l", "2s", "--policy", "orca")


@pytest.fixture
def arriving(tmp_path):
    """Few requests, so that replays are short."""
    path = tmp_path / "t.csv"
    rows = (f"{300 + i % 50},{20 + i % 7},{i / 10}" for i in range(200))
    path.write_text("input,output,arrival_s\n" + "\n".join(rows) + "\n")
    return ("-w", path, "--arrivals", "trace", "--rate", "200/s")


@pytest.fixture
def prices(tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text("A40: 0.4\nh100: 10\n")
    return path


def test_the_answer_is_the_cheapest_kind_and_its_schedule_is_searched(exegpt, arriving, prices, tmp_path):
    command = (*ASKED, *arriving, "--devices", "A40,H100-SXM,L4", "--price", prices)
    answer = exegpt(*command, "--out", tmp_path / "s.json", "--json").json
    (best,) = answer["needed"]
    assert answer["cluster"] == best["cluster"] and answer["schedule"]["cluster"]["name"] == best["cluster"]
    assert best["kind"] == "A40" and best["devices"] == best["replicas"] * best["tp"] * best["pp"]
    assert answer["price_per_hour"] == best["price_per_hour"] == pytest.approx(0.4 * best["devices"])
    assert answer["goodput_seq_s"] >= answer["rate_seq_s"] == 200
    assert answer["schedule"]["replicas"] == best["replicas"]
    assert answer["left_out"] == {"L4": "it has no price"}
    (other,) = answer["other_kinds"]
    assert other["kind"] == "H100-SXM" and other["price_per_hour_at_least"] >= best["price_per_hour"]
    on_cluster = exegpt(*ASKED, *arriving, "-c", best["cluster"], "--replicas", str(best["replicas"]), "--json").json
    assert on_cluster["goodput_seq_s"] == answer["goodput_seq_s"]  # the same answer as on that cluster by name
    assert json.loads((tmp_path / "s.json").read_text()) == answer["schedule"]
    text = exegpt(*command)
    assert "left out: L4: it has no price" in text.err and "xH100-SXM" in text.out and "≥" in text.out
    assert "per million output tokens" in text.out


def test_without_prices_the_fewest_devices_are_the_answer(exegpt, arriving):
    answer = exegpt(*ASKED, *arriving, "--devices", "A40,L40S", "--top", "2", "--json").json
    first, second = answer["needed"]
    assert first["devices"] <= second["devices"] and first["price_per_hour"] is None
    assert answer["price_per_million_output_tokens"] is None


def test_the_number_of_draft_tokens_is_searched(exegpt, arriving):
    command = (*ASKED, *arriving, "--devices", "A40", "--draft-acceptance", "0.9,0.2,0.1")
    answer = exegpt(*command, "--json").json
    assert answer["speculation"]["draft_tokens"] == len(answer["schedule"]["speculation"]["acceptance"]) == 1
    assert {gain["drafted"] for gain in answer["speculation"]["by_batch"]} <= {0, 1, 2, 3}


def test_a_load_curve_gives_the_replicas_of_each_hour(exegpt, arriving, prices, tmp_path):
    (tmp_path / "day.csv").write_text("hour,rate\n0,20\n8,200\n20,0\n24,0\n")
    lengths = arriving[: arriving.index("--rate")]
    command = (*ASKED, *lengths, "--load-curve", tmp_path / "day.csv", "--devices", "A40", "--price", prices)
    answer = exegpt(*command, "--json").json
    assert answer["rate_seq_s"] == 200
    night, day, *off = answer["load_curve"]["hours"]
    assert day["replicas"] == answer["schedule"]["replicas"] > night["replicas"] >= 1
    assert [(hour["hours"], hour["replicas"]) for hour in off] == [(4, 0), (4, 0)]
    assert answer["load_curve"]["device_hours"] == 8 * night["devices"] + 12 * day["devices"]
    assert answer["load_curve"]["price"] == pytest.approx(0.4 * answer["load_curve"]["device_hours"])
    outputs = sum(20 + i % 7 for i in range(200)) / 200 * 3600 * (8 * 20 + 12 * 200)
    price = 1e6 * answer["load_curve"]["price"] / outputs
    assert answer["load_curve"]["price_per_million_output_tokens"] == pytest.approx(price)
    text = exegpt(*command).out
    assert "Replicas over 28 hours" in text and f"{answer['load_curve']['device_hours']:g} device-hours" in text


def test_no_kind_keeps_the_bound(exegpt):
    asked = ("-m", "opt-1.3b", "-w", "T", "-l", "1ms", "--rate", "1/s", "--devices", "A40", "--json")
    done = exegpt("tune", *asked)
    assert done.code == 3 and done.json["needed"] == [] and done.json["schedule"] is None
    assert done.json["left_out"] == {"A40": "no replica on up to 32 devices keeps the bounds"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--devices", "any"), "--devices any needs an arrival rate: add --rate"),
        (("--devices", "any", "--rate", "1/s", "-c", "1xA40"), "--devices any finds the cluster: leave --cluster out"),
        (("--devices", "any", "--rate", "1/s", "--replicas", "2"), "leave --replicas out"),
        (("--devices", "X900", "--rate", "1/s"), "There is no device kind 'X900'"),
        (("--devices", "A40", "--rate", "1/s", "-m", "none-such"), "none-such"),
        (("--load-curve", __file__, "--rate", "1/s"), "--load-curve has the rates: leave --rate 1/s out"),
        (("--top", "2", "--rate", "1/s"), "--top 2 is the number of answers with --devices"),
    ],
)
def test_what_devices_do_not_go_with_is_refused(exegpt, more, said):
    check_refused(exegpt(*ASKED, *more), said)


def test_kinds_without_any_price_are_refused(exegpt, prices):
    done = exegpt(*ASKED, "--rate", "1/s", "--devices", "L4,T4", "--price", prices)
    check_refused(done, "--devices L4,T4: none of these kinds has a price")
