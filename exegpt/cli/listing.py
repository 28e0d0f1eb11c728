"""`exegpt list`: the built-in models, devices, tasks, policies and orders."""

from dataclasses import dataclass

from exegpt.options.option_record import argument, command
from exegpt.options.shared_options import PluginOptions
from xcore.quantity import figure_text


@dataclass(frozen=True, kw_only=True)
class ListOptions(PluginOptions):
    """The list to print."""

    what: str = argument("The list to print.", metavar="models|devices|tasks|policies|orders")


@command
def list_(options: ListOptions) -> None:
    """List the built-in models, devices, tasks, policies or orders.

    Example: exegpt list models
    """
    from xcore.choices import check_choice
    from xcore.console import output

    listings = {"models": _models, "devices": _devices, "tasks": _tasks, "policies": _policies, "orders": _orders}
    check_choice(options.what, tuple(listings), "List")
    rows = listings[options.what]()
    if options.json:
        return output.emit({options.what: rows, "provenance": output.provenance()})
    columns = list(rows[0])
    output.table(columns, [[_cell(row[column]) for column in columns] for row in rows])


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else figure_text(value, 4) if isinstance(value, float) else str(value)


def _models() -> list[dict[str, object]]:
    from xcore.specs.builtin_models import HUB_IDS, builtin_model

    rows: list[dict[str, object]] = []
    for name, hub in HUB_IDS.items():
        spec = builtin_model(name)
        layers = f"{spec.encoder_layers}+{spec.layers}" if spec.encoder_layers else str(spec.layers)
        rows.append(
            {
                "name": name,
                "architecture": spec.architecture,
                "parameters": spec.parameters,
                "active": spec.active_parameters,
                "dtype": spec.dtype,
                "layers": layers,
                "hidden": spec.hidden,
                "context": spec.longest_request,
                "hub_id": hub,
            }
        )
    return rows


_RATES = ("fp16", "bf16", "fp32", "fp8", "fp4", "int8")
"""Dtypes whose rates a device's row has."""


def _devices() -> list[dict[str, object]]:
    from xcore.specs.cluster import parse_cluster
    from xcore.specs.device_sheets import KINDS, SHEETS

    return [
        {
            "kind": spec.kind,
            "memory_gib": round(spec.memory_bytes / 2**30),
            "bandwidth_gb_s": round(spec.bandwidth_bytes_s / 1e9),
            **{f"{dtype}_tflops": spec.flops_s.get(dtype, 0) / 1e12 or None for dtype in _RATES},
            "all_reduce_gb_s": round(cluster.intra.reached_bytes_s(8) / 1e9),
            "network_gb_s": round(cluster.inter.bandwidth_bytes_s / 1e9),
            "shares_from": SHEETS[spec.kind].shares_from,
            "links_from": SHEETS[spec.kind].links_from,
            "sheet": SHEETS[spec.kind].checked,
        }
        for cluster in map(parse_cluster, (f"8x{kind}" for kind in KINDS))
        for spec in (cluster.device,)
    ]


def _tasks() -> list[dict[str, object]]:
    from xcore.specs.workload import TASKS, task

    rows: list[dict[str, object]] = []
    for name, title in TASKS.items():
        workload = task(name)
        rows.append(
            {
                "task": name,
                "title": title,
                "input_mean": round(workload.input.mean),
                "input_max": workload.input.max,
                "output_mean": round(workload.output.mean),
                "output_p99": workload.p99_output,
                "output_max": workload.output.max,
            }
        )
    return rows


def _policies() -> list[dict[str, object]]:
    from xcore.policies import TRAITS

    return [{"policy": t.name, "variables": ", ".join(t.searched), "what": t.what} for t in TRAITS.values()]


def _orders() -> list[dict[str, object]]:
    from xcore.orders import ORDERS

    return [
        {"order": kind.name, "needs": ", ".join(kind.needs), "oracle": "yes" if kind.oracle else "", "what": kind.what}
        for kind in ORDERS.values()
    ]
