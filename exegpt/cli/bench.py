"""`exegpt bench`: compare predictions with measured runs, policy by policy, on the same requests."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from exegpt.cli import options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xcore.console.comparison import Comparison


class BenchGroup(TyperGroup):
    """The group `exegpt bench`; its required options are optional for its subcommands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the arguments after the group's own."""
        if args and args[0] in self.commands:
            for parameter in self.params:
                parameter.required = False
        return super().parse_args(ctx, args)


def bench(
    context: typer.Context,
    schedule: options.REQUIRED_SCHEDULE,
    model: options.MODEL_DIRECTORY,
    requests: Annotated[str | None, typer.Option("--requests", "-r", help="A JSONL or trace file.")] = None,
    workload: options.WORKLOAD = None,
    num: Annotated[
        int | None, typer.Option("--num", "-n", min=1, help="Requests drawn from --workload. Default: 64.")
    ] = None,
    profile: options.PROFILE = None,
    policy: Annotated[
        str | None, typer.Option("--policy", help="Also run the best schedules of these policies, or of `all`.")
    ] = None,
    peers: Annotated[str | None, typer.Option(help="Also run the requests with these engines: transformers.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each; the median run is reported.")] = 3,
    columns: options.COLUMNS = None,
    scale_to_context: options.SCALE_TO_CONTEXT = False,
    rate: options.RATE = None,
    seed: options.SEED = 0,
    device: options.DEVICE = None,
    attention: options.ATTENTION = None,
    threads: options.THREADS = None,
    report: options.REPORT = None,
    plugin: options.PLUGIN = None,
    json: options.JSON = False,
) -> None:
    """Run requests under a schedule, and under other policies' best schedules, and compare with the predictions.

    Peers run the same requests without a bound, on the same device: --peers transformers is its `generate` in static
    batches and its continuous batching. `exegpt bench serve` load-tests a server instead.

    Example: exegpt bench --schedule schedule.json --model my-model --workload T --num 64

    Example: mpirun -n 2 exegpt bench --schedule two-ranks.json --model my-model --profile ranks.json --policy waa-c
    """
    if context.invoked_subcommand:
        return
    from exegpt.api.bench import BenchOptions
    from exegpt.api.bench import bench as compare
    from exegpt.api.reports import write_run_report
    from xcore.console import output
    from xrunner.comm.ranks import job

    bench_options = options.build(BenchOptions, locals())
    with job() as ranks:
        plan, comparisons, peer_rows = compare(bench_options, ranks)
    if ranks.rank:
        return
    setting, assumptions = plan.setting, [*plan.setting.assumptions, *plan.notes]
    if report:
        write_run_report(report, f"{setting.model.name}: predicted and measured", setting, comparisons)
    if json:
        return output.emit(
            {
                "policies": [{"policy": c.schedule.policy, **c.document()} for c in comparisons],
                "peers": peer_rows,
                "assumptions": assumptions,
                "provenance": output.provenance(setting.profile, seed, attention=plan.described),
            }
        )
    output.notes(assumptions)
    _print(comparisons, peer_rows)
    each = f"median of {repeats} runs each" if repeats > 1 else "one run each"
    print(f"{len(plan.requests)} requests, {each}.")


def _print(comparisons: "Sequence[Comparison]", peer_rows: "Sequence[dict[str, Any]]") -> None:
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
