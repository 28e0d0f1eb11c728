"""Who runs next on devices that models share: models that always have prompts, on a stand-in for the devices."""

from types import SimpleNamespace

from xcore.policies.sharing import SpatialSharing


class Devices:
    """Of models with prompts and residents that never end; what was started is kept."""

    def __init__(self, count, prefill_share=1.0, decode_share=0.2):
        limits = SimpleNamespace(prefill_share=prefill_share, decode_share=decode_share)
        self.running, self.started = [], []
        self.tenants = [
            SimpleNamespace(
                place=place,
                job=None,
                idle_since_s=0.0,
                limits=limits,
                can_prefill=lambda _: True,
                can_decode=lambda _: True,
            )
            for place in range(count)
        ]

    @property
    def used(self):
        return sum(job.share for job in self.running)

    def prefill(self, tenant):
        self._start(tenant, "encode", tenant.limits.prefill_share)

    def decode(self, tenant, most=None):
        self._start(tenant, "decode", tenant.limits.decode_share)

    def _start(self, tenant, phase, share):
        tenant.job = SimpleNamespace(tenant=tenant, phase=phase, share=share, cut=lambda now: None)
        self.running.append(tenant.job)
        self.started.append((tenant.place, phase))

    def end(self, phase, now):
        """All jobs of a phase."""
        for job in [job for job in self.running if job.phase == phase]:
            job.tenant.job, job.tenant.idle_since_s = None, now
            self.running.remove(job)


def test_models_prefill_in_turns():
    """While nobody decodes: those that do run beside."""
    sharing, devices = SpatialSharing(), Devices(3, decode_share=2.0)
    for now in range(7):
        sharing.start(devices, float(now))
        devices.end("encode", float(now))
    assert devices.started == [(place, "encode") for place in (0, 1, 2, 0, 1, 2, 0)]


def test_decoding_runs_beside_a_prefill_within_the_overlap():
    """1 and 0.2, but not 1 and twice 0.2."""
    devices = Devices(3)
    SpatialSharing(overlap=0.3).start(devices, 0.0)
    assert devices.started == [(0, "encode"), (1, "decode")]


def test_no_decoding_begins_while_a_prompt_waits_for_devices():
    """What decodes has so much of them that the prompt doesn't fit."""
    sharing, devices = SpatialSharing(overlap=0.3), Devices(3, decode_share=0.5)
    devices.decode(devices.tenants[0])
    sharing.start(devices, 1.0)
    assert devices.started == [(0, "decode")]
    devices.end("decode", 2.0)
    sharing.start(devices, 2.0)
    assert devices.started == [(0, "decode"), (0, "encode")]
