"""The replicas of each hour of a load curve, against trying every number of replicas."""

from dataclasses import replace

import pytest

from xcore.specs.bound import ALL_REQUESTS
from xcore.specs.load_curve import LoadHour
from xcore.specs.schedule import devices
from xscheduler.device_search import options_of
from xscheduler.goodput import Meter, RateBounds
from xscheduler.hourly_replicas import REQUESTS_AN_HOUR, hourly_replicas
from xscheduler.rate_sample import Arrivals
from xscheduler.replica_layout import DevicesNeeded, RateQuestion, replica_layouts
from xscheduler.replicas_needed import needed_by
from xscheduler.setting_search import SearchOptions
from xscheduler.settings import find_setting


def test_each_hour_has_the_fewest_replicas_that_sustain_its_rate():
    setting = find_setting("opt-13b", "8xA40", "512/32", "roofline", one_engine=True)
    arrivals = Arrivals.poisson(setting.workload, setting.model.longest_request, count=4000)
    bounds = RateBounds(3.0)
    search = SearchOptions(ALL_REQUESTS, None, None, ("chunked",), "bnb", 0.0)
    asked = RateQuestion(60.0, bounds, search, arrivals)
    (option,) = options_of(replica_layouts(setting, {"tp_degree": 2})[:1], asked)
    needed = needed_by(option.layout, option.most, asked)
    assert isinstance(needed, DevicesNeeded) and needed.replicas >= 4
    meter, rates = Meter(setting.profile, arrivals, bounds), (0.0, 1.0, 9.0, 21.0, 38.0, 60.0, 9.0)
    curve = tuple(LoadHour(float(place), 1.0, rate) for place, rate in enumerate(rates))
    day = hourly_replicas(meter, needed.schedule, needed.goodput_seq_s, curve)

    def fewest(rate):
        if rate == 0.0:
            return 0
        numbers = range(1, needed.replicas)
        held = (n for n in numbers if meter.sustains(replace(needed.schedule, replicas=n), rate, REQUESTS_AN_HOUR))
        return next(held, needed.replicas)

    assert day.replicas == tuple(map(fewest, rates))
    assert len(set(day.replicas)) >= 4
    assert day.device_hours == devices(needed.schedule) * sum(day.replicas) and day.hours == 7.0
    assert day.requests == pytest.approx(3600 * sum(rates))


def test_replicas_cost_what_all_their_devices_do_and_nothing_is_known_without_prices():
    setting = find_setting("opt-13b", "8xA40", "512/32", "roofline", one_engine=True)
    search = SearchOptions(ALL_REQUESTS, None, None, ("chunked",), "bnb", 0.0)
    asked = RateQuestion(60.0, RateBounds(3.0), search, Arrivals.poisson(setting.workload, None, count=10))
    layout = replica_layouts(setting, {"tp_degree": 2})[0]
    assert layout.devices == 2 and asked.price(layout, 3) is None
    assert replace(asked, prices={"A40": 1.5, "L4": 9.0}).price(layout, 3) == 6 * 1.5
