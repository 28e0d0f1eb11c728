"""The page for Prometheus: one model's metrics, or those of several models with a label `model_name`.

Replicas of a model have a label `replica`, too.
"""

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector


def render(collector: Collector, accept: str) -> tuple[bytes, str]:
    """Return the text of all metrics in the format that a client accepts, with its media type."""
    encode, kind = choose_encoder(accept)
    return encode(collector), kind


class ByModel(Collector):
    """The metrics of several registries, each metric once with all series, to which the registry's labels are added."""

    def __init__(self, registries: Sequence[tuple[Mapping[str, str], CollectorRegistry]]):
        self._registries = registries

    def collect(self) -> Iterable[Metric]:
        """Return each metric with the series of all registries."""
        merged: dict[str, Metric] = {}
        for labels, registry in self._registries:
            for metric in registry.collect():
                whole = merged.setdefault(
                    metric.name, Metric(metric.name, metric.documentation, metric.type, metric.unit)
                )
                whole.samples += [s._replace(labels=dict(labels) | s.labels) for s in metric.samples]
        return merged.values()
