"""`exegpt bench`: compare predictions with measured runs, policy by policy, on the same requests."""

from typing import TYPE_CHECKING

from typer.core import TyperGroup

from exegpt.options.bench import BenchOptions
from exegpt.options.option_record import command
from xcore.frozen_heap import imports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typer._click import Context

    from exegpt.api.bench import PeerRow
    from xcore.console.comparison import Comparison


class BenchGroup(TyperGroup):
    """The group `exegpt bench`; its required options are optional for its subcommands."""

    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        """Return the arguments that follow the group's own options."""
        required = [parameter for parameter in self.params if parameter.required]
        for parameter in required:
            parameter.required = not (args and args[0] in self.commands)
        try:
            return super().parse_args(ctx, args)
        finally:
            for parameter in required:
                parameter.required = True


@command
def bench(options: BenchOptions) -> None:
    """Run requests under a schedule, and under other policies' best schedules, and compare with the predictions.

    Peers run the same requests without a bound, on the same device. With --peers transformers, these are its `generate`
    in static batches and its continuous batching. `exegpt bench serve` load-tests a server instead.

    Example: exegpt bench --schedule schedule.json --model my-model --workload T --num 64

    Example: mpirun -n 2 exegpt bench --schedule two-ranks.json --model my-model --profile ranks.json --policy waa-c
    """
    with imports():
        from exegpt.api.bench import bench as compare
    from exegpt.api.reports import write_run_report
    from xcore.console import output
    from xcore.quantity import counted
    from xrunner.comm.ranks import job

    with job() as ranks:
        plan, comparisons, peer_rows = compare(options, ranks)
    if ranks.rank:
        return
    setting, assumptions = plan.setting, [*plan.setting.assumptions, *plan.notes]
    if options.report:
        write_run_report(options.report, f"{setting.model.name}: predicted and measured", setting, comparisons)
    if options.json:
        return output.emit(
            {
                "policies": [{"policy": c.schedule.policy, **c.document()} for c in comparisons],
                "peers": peer_rows,
                "assumptions": assumptions,
                "provenance": output.provenance(setting.profile, options.seed, attention=plan.described),
            }
        )
    output.notes(assumptions)
    _print(comparisons, peer_rows)
    each = f"median of {options.repeats} runs each" if options.repeats > 1 else "one run each"
    print(f"{counted(len(plan.requests), 'request')}, {each}.")


def _print(comparisons: "Sequence[Comparison]", peer_rows: "Sequence[PeerRow]") -> None:
    """Print predicted and measured results, and those of the peers."""
    from exegpt.report.comparison_text import COMPARISON_COLUMNS, comparison_rows
    from xcore.console import output

    output.table(COMPARISON_COLUMNS, comparison_rows(comparisons))
    if peer_rows:
        rows = [
            [
                row["peer"],
                row["setting"],
                output.number(row["tokens_s"]),
                output.seconds(row["latency_s"]),
                f"{row['ratio']:.2f}",
                f"{row['alike']:.1%}",
            ]
            for row in peer_rows
        ]
        speedup = f"{comparisons[0].schedule.policy} / peer"
        output.table(["peer", "setting", "tok/s", "bounded latency", speedup, "equal tokens"], rows)
