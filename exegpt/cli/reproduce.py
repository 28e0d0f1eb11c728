"""`exegpt reproduce`: the papers' evaluations, printed next to the published figures."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exegpt.cli import options

if TYPE_CHECKING:
    from exegpt.report.sections import Section

app = typer.Typer(
    help="Reproduce the papers' evaluations: simulated on stock rooflines, printed next to the published figures.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
STANDS_ON = "Simulated with the stock roofline of every device, in fp16, with all of its memory; nothing ran on a GPU."

_MODEL = Annotated[str | None, typer.Option("--model", "-m", help="Only this model's scenarios.")]
_TASK = Annotated[str | None, typer.Option("--workload", "-w", help="Only this task's scenarios.")]
_OVER_ALL = Annotated[bool, typer.Option("--over-all", help="Both figures, and the means over all scenarios.")]


@app.command(short_help="Table 5: violations of monotonicity.")
def table5(report: options.REPORT = None, json: options.JSON = False) -> None:
    """How often each control variable breaks the monotonicity of throughput and latency.

    Example: exegpt reproduce table5 --json
    """
    from exegpt.reproduction import table5 as table

    _show("table5", table.reproduce, table.sections, report, json)


@app.command(short_help="Table 6: OPT-13B at the paper's schedules.")
def table6(report: options.REPORT = None, json: options.JSON = False) -> None:
    """OPT-13B on four A40s at the paper's own schedules, and the results of searches under the same bounds.

    Example: exegpt reproduce table6 --json
    """
    from exegpt.reproduction import table6 as table

    _show("table6", table.reproduce, table.sections, report, json)


@app.command(short_help="Figure 6: gains of small to mid-sized models.")
def figure6(
    model: _MODEL = None,
    workload: _TASK = None,
    over_all: _OVER_ALL = False,
    report: options.REPORT = None,
    json: options.JSON = False,
) -> None:
    """Throughput of small to mid-sized models over FasterTransformer's, under four bounds each.

    Example: exegpt reproduce figure6 --model opt-13b --report figure6.html
    """
    _gains("figure6", over_all, model, workload, report, json)


@app.command(short_help="Figure 8: gains of large models.")
def figure8(
    model: _MODEL = None,
    workload: _TASK = None,
    over_all: _OVER_ALL = False,
    report: options.REPORT = None,
    json: options.JSON = False,
) -> None:
    """Throughput of large models over FasterTransformer's, under four bounds each.

    Example: exegpt reproduce figure8 --report figure8.html
    """
    _gains("figure8", over_all, model, workload, report, json)


@app.command(short_help="Figure 11: changing output lengths.")
def figure11(report: options.REPORT = None, json: options.JSON = False) -> None:
    """Compare an unchanged schedule with a newly searched one when output lengths change.

    Example: exegpt reproduce figure11 --report figure11.html
    """
    from exegpt.reproduction import figure11 as drawing

    _show("figure11", drawing.reproduce, drawing.sections, report, json)


@app.command("search-cost", short_help="Cost and result of each search method.")
def search_cost(
    exhaustive_points: Annotated[
        int | None, typer.Option(min=0, help="Exhaustively search spaces of up to this many points. Default: 60000.")
    ] = None,
    report: options.REPORT = None,
    json: options.JSON = False,
) -> None:
    """Compare cost and result of branch and bound, exhaustive search and Optuna.

    Example: exegpt reproduce search-cost --exhaustive-points 1000000
    """
    from exegpt.reproduction import search_cost as cost

    most = cost.EXHAUSTIVE_POINTS if exhaustive_points is None else exhaustive_points
    _show("search-cost", lambda progress: cost.reproduce(most, progress), cost.sections, report, json)


@app.command(short_help="Several models at once, by SamuLLM.")
def samullm(report: options.REPORT = None, json: options.JSON = False) -> None:
    """SamuLLM's applications of several models, planned in stages, compared with its baseline heuristics.

    Needs SamuLLM's published measurements, in the folder samullm/ of the one that EXEGPT_DATA names.

    Example: exegpt reproduce samullm --report samullm.html
    """
    from exegpt.reproduction import samullm as paper

    _show("samullm", paper.reproduce, paper.sections, report, json, paper.STANDS_ON)


@app.command(short_help="Several models on shared GPUs, by MuxServe.")
def muxserve(report: options.REPORT = None, json: options.JSON = False) -> None:
    """Replay MuxServe's 20 published workloads of 19 models at its placements.

    Models run on shares of GPUs, by time sharing, and on dedicated GPUs.

    Needs MuxServe's published measurements, in the folder $EXEGPT_DATA/muxserve/.

    Example: exegpt reproduce muxserve --report muxserve.html
    """
    from exegpt.reproduction import muxserve as paper

    _show("muxserve", paper.reproduce, paper.sections, report, json, paper.STANDS_ON)


@app.command("learned-order", short_help="vLLM-LTR: requests in the order of a learned rank.")
def learned_order(report: options.REPORT = None, json: options.JSON = False) -> None:
    """Compare requests in the order of a learned rank with other orders, over arrival rates.

    The other orders are first come, first served, MLFQ, a classifier and oracles.

    Example: exegpt reproduce learned-order --json
    """
    from exegpt.reproduction import learned_order as paper

    _show("learned-order", paper.reproduce, paper.sections, report, json)


@app.command(short_help="Hermes: applications ordered by demand graphs.")
def hermes(
    graphs: Annotated[
        Path | None,
        typer.Option(help="Demand graphs, or a log of calls (.jsonl). Default: EXEGPT_DATA's, else built-in sizes."),
    ] = None,
    report: options.REPORT = None,
    json: options.JSON = False,
) -> None:
    """Hermes' applications on one LLM: orders, deadlines, ablations, caches and the prewarming knob.

    Example: exegpt reproduce hermes --graphs pdgraphs.json
    """
    from exegpt.reproduction import hermes as paper
    from exegpt.reproduction.hermes_sections import sections

    work = lambda progress: paper.reproduce(progress, graphs)  # noqa: E731
    _show("hermes", work, sections, report, json, paper.STANDS_ON)


@app.command(short_help="SeaLLM: services that share GPUs, for latency.")
def seallm(
    sweeps: Annotated[
        bool, typer.Option("--sweeps", help="Instead: sweeps over densities, runs of requests and noise in lengths.")
    ] = False,
    report: options.REPORT = None,
    json: options.JSON = False,
) -> None:
    """Compare SeaLLM's placement, order and replacement with dedicated GPUs, AlpaServe and MuxServe.

    Sixteen services run on 32 A800, over rates and bursts. Takes many minutes.

    Example: exegpt reproduce seallm --report seallm.html
    """
    from exegpt.reproduction import seallm as paper

    work = lambda progress: paper.reproduce(progress, sweeps)  # noqa: E731
    _show("seallm", work, paper.sections, report, json, paper.STANDS_ON)


@app.command(short_help="All papers about several models on one cluster.")
def multimodel(report: options.REPORT = None, json: options.JSON = False) -> None:
    """MuxServe, SamuLLM, Hermes, vLLM-LTR and SeaLLM, one after the other. Takes many minutes.

    Needs the published measurements in the folder $EXEGPT_DATA.

    Example: exegpt reproduce multimodel --report multimodel.html
    """
    from exegpt.reproduction import multimodel as papers

    _show("multimodel", papers.reproduce, papers.sections, report, json, papers.STANDS_ON)


def _gains(name: str, over_all: bool, model: str | None, task: str | None, report: Path | None, json: bool) -> None:
    from exegpt.reproduction import gains

    figures = tuple(gains.FIGURES) if over_all else (name,)
    _show(name, lambda progress: gains.reproduce(figures, model, task, progress), gains.sections, report, json)


def _show(
    name: str,
    work: "Callable[[Callable[[int, int], None]], Any]",
    sections: "Callable[[Any], list[Section]]",
    report: Path | None,
    json: bool,
    stands_on: str = STANDS_ON,
) -> None:
    """Run `work`, then print its sections or its document, and write the page."""
    from exegpt.report.sections import page
    from xcore import document
    from xcore.console import output
    from xcore.files import check_output

    check_output(report)
    with output.progress(name) as progress:
        result = work(progress)
    shown = sections(result)
    if report:
        document.write_text(report, page(f"{name} of the paper, reproduced", (stands_on,), shown))
    if json:
        return output.emit({"reproduces": name, **asdict(result), "provenance": output.provenance()})
    output.note(f"· {stands_on}")
    for section in shown:
        output.table(section.columns, section.rows, section.title)
        for note in section.notes:
            print(note)
        print()
