"""Continuation of a unit: predicts how models that share devices go on with their present sequences."""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import replace

from xcore.batching import Sequence
from xcore.batching.shared_pool import shared_pools
from xcore.specs.cluster_plan import PlannedModel, Share
from xmulti.sharing.replay import empty_tenant
from xmulti.sharing.simulated_unit import SimulatedUnit
from xmulti.sharing.tenant import SimulatedTenant
from xmulti.sharing.unit_loads import CONTENTION, AnyProfile, loads_of, order_of, overhead_of, rule_of
from xsimulator.replay.continuation import Continued, Standing
from xsimulator.replay.event_queue import run
from xsimulator.replay.record import Record


class UnitContinuation:
    """Continues the sequences of a plan's unit in the event simulator, by the unit's rule of sharing."""

    def __init__(self, unit: Items[PlannedModel], profiles: Mapping[str, AnyProfile]):
        """Prepare the costs of the models' iterations; `profiles` are by the models' names."""
        self._share = unit[0].share or Share("time")
        self._schedules = [model.schedule for model in unit]
        self.loads = {load.name: load for load in loads_of(unit, profiles, {})}
        """Each model's costs and KV blocks on the devices, without requests."""
        self._hints = [order_of(model, profiles[model.name])[1] for model in unit]
        self.overhead = overhead_of(unit, profiles)
        """Factor by which all iterations take longer because the models share."""

    def run(self, standing: Mapping[str, Items[Standing]], horizon_s: float) -> dict[str, list[Continued]]:
        """Predict the start and end of each model's sequences, up to `horizon_s`.

        `standing` holds first the running and then the waiting sequences of a model, by its name. A sequence in prefill
        counts as the first waiting one. The devices count as free at once.
        """
        _, pools = shared_pools(self._schedules, self._share.pool)
        records = [Record(len(standing.get(load.name, ())), lambda _: 0, False) for load in self.loads.values()]
        tenants = [
            empty_tenant(replace(load, pool=pool), record)
            for load, pool, record in zip(self.loads.values(), pools, records, strict=True)
        ]
        for place, tenant in enumerate(tenants):
            self._fill(tenant, records[place], standing.get(tenant.name, ()), place)
        run([SimulatedUnit(tenants, rule_of(self._share), CONTENTION, self.overhead)], horizon_s)
        continued = {}
        for tenant, record in zip(tenants, records, strict=True):
            finish = {served.index: served.finish_s for served in record.served}
            count = len(standing.get(tenant.name, ()))
            continued[tenant.name] = [Continued(record.start_of(i), finish.get(i)) for i in range(count)]
        return continued

    def _fill(self, tenant: SimulatedTenant, record: Record, standing: Items[Standing], place: int) -> None:
        """Give a model its present sequences."""
        hints = self._hints[place]
        for index, at in enumerate(standing):
            ends = max(at.ends, at.generated + 1)
            sequence = Sequence(index, at.input_tokens, at.max_output, at.arrival_s, ends)
            sequence.hints = hints or sequence.hints
            if at.generated and tenant.ledger.seat(sequence, at.generated):
                record.began(index)
                continue
            if at.generated:  # no blocks for it: the engine prefills its prompt and output again
                sequence.recompute(encoder_decoder=False)
            tenant.ledger.submit([sequence])
