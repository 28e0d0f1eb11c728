"""Times alone, and normalised latencies: of requests that never meet, their times alone over themselves."""

from xcore.specs.schedule import Stage
from xcore.specs.workload import RequestLengths
from xmulti.plans.demands import ModelDemand
from xmulti.plans.mean_batch_one_latency import mean_batch_one_latency
from xmulti.plans.plan_evaluation import evaluated
from xmulti.sharing.shared_devices import share_unit
from xscheduler.settings import find_setting
from xsimulator.cost.batch_one_latency import batch_one_times
from xsimulator.cost.cost_model import CostModel

REQUESTS = [RequestLengths(100, 20), RequestLengths(300, 60)]


def on_group(setting, tp):
    cost_model = CostModel(setting.model, setting.cluster, setting.profile, setting.kv_dtype)
    replica = cost_model.replica((Stage(tuple(range(tp)), tp, "both", None, (0, setting.model.layers)),))
    return batch_one_times(replica, [r.input for r in REQUESTS], [r.output for r in REQUESTS]).total.mean()


def test_it_is_the_smallest_group_that_holds_the_model():
    small, large = (find_setting(name, "4xA40", "128/32") for name in ("opt-1.3b", "opt-30b"))
    assert mean_batch_one_latency(small, REQUESTS) == on_group(small, 1)
    assert mean_batch_one_latency(large, REQUESTS) == on_group(large, 2)
    assert mean_batch_one_latency(find_setting("opt-66b", "1xA40", "128/32"), REQUESTS) is None


def test_requests_that_never_meet_take_their_time_alone():
    setting = find_setting("opt-1.3b", "2xA40", "128/32")
    demand = ModelDemand("a", setting, 0.05, None, 5.0)
    unit = share_unit([demand], setting.cluster, 1, "time", 1.0)
    (idle,) = evaluated(unit, {"a": demand})
    assert 0.99 < idle.normalised_latency < 1.05 and idle.attainment == 1.0
    (busy,) = evaluated(unit, {"a": ModelDemand("a", setting, 0.5 * idle.goodput_seq_s, None, 5.0)})
    assert busy.normalised_latency > 1.2
