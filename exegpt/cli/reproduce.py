"""`exegpt reproduce`: the papers' evaluations, printed next to the published figures."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from exegpt.options.option_record import command, option
from exegpt.options.shared_options import REPORT, JsonOption

if TYPE_CHECKING:
    from exegpt.report.sections import Section

app = typer.Typer(
    help="Reproduce the papers' evaluations: simulated on stock rooflines, printed next to the published figures.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
STANDS_ON = "Simulated with the stock roofline of every device, in fp16, with all of its memory; nothing ran on a GPU."


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions(JsonOption):
    """The output of a reproduction."""

    report: Path | None = REPORT


@dataclass(frozen=True, kw_only=True)
class GainsOptions(ReproduceOptions):
    """The scenarios of figure 6 or 8."""

    model: str | None = option(None, "Only this model's scenarios.", "-m")
    workload: str | None = option(None, "Only this task's scenarios.", "-w")
    over_all: bool = option(False, "Print both figures, and the means over all scenarios.")


@dataclass(frozen=True, kw_only=True)
class SearchCostOptions(ReproduceOptions):
    """The spaces that are searched."""

    exhaustive_points: int | None = option(
        None, "Exhaustively search spaces of up to this many points. Default: 60000.", min=0
    )


@dataclass(frozen=True, kw_only=True)
class HermesOptions(ReproduceOptions):
    """The demand graphs of the applications."""

    graphs: Path | None = option(
        None,
        "A file of demand graphs, or a log of calls (.jsonl). Default: the graphs in $EXEGPT_DATA, else "
        "built-in sizes.",
    )


@dataclass(frozen=True, kw_only=True)
class SeaLLMOptions(ReproduceOptions):
    """The experiments."""

    sweeps: bool = option(False, "Run sweeps instead: over densities, runs of requests, and noise in lengths.")


@app.command(short_help="Table 5: violations of monotonicity.")
@command
def table5(options: ReproduceOptions) -> None:
    """Count how often each control variable breaks the monotonicity of throughput and latency.

    Example: exegpt reproduce table5 --json
    """
    from exegpt.reproduction import table5 as table

    _show("table5", table.reproduce, table.sections, options)


@app.command(short_help="Table 6: OPT-13B at the paper's schedules.")
@command
def table6(options: ReproduceOptions) -> None:
    """Predict OPT-13B on four A40s at the paper's own schedules, and search under the same bounds.

    Example: exegpt reproduce table6 --json
    """
    from exegpt.reproduction import table6 as table

    _show("table6", table.reproduce, table.sections, options)


@app.command(short_help="Figure 6: gains of small to mid-sized models.")
@command
def figure6(options: GainsOptions) -> None:
    """Compare the throughput of small to mid-sized models with that of FasterTransformer, under four bounds each.

    Example: exegpt reproduce figure6 --model opt-13b --report figure6.html
    """
    _gains("figure6", options)


@app.command(short_help="Figure 8: gains of large models.")
@command
def figure8(options: GainsOptions) -> None:
    """Compare the throughput of large models with that of FasterTransformer, under four bounds each.

    Example: exegpt reproduce figure8 --report figure8.html
    """
    _gains("figure8", options)


@app.command(short_help="Figure 9: memory of FasterTransformer and WAA.")
@command
def figure9(options: ReproduceOptions) -> None:
    """Compare the memory in use on each side of WAA-C and WAA-M with FasterTransformer's.

    Example: exegpt reproduce figure9 --json
    """
    from exegpt.reproduction import figure9 as drawing

    _show("figure9", drawing.reproduce, drawing.sections, options)


@app.command(short_help="Figure 11: changing output lengths.")
@command
def figure11(options: ReproduceOptions) -> None:
    """Compare an unchanged schedule with a newly searched one when output lengths change.

    Example: exegpt reproduce figure11 --report figure11.html
    """
    from exegpt.reproduction import figure11 as drawing

    _show("figure11", drawing.reproduce, drawing.sections, options)


@app.command("search-cost", short_help="Cost and result of each search method.")
@command
def search_cost(options: SearchCostOptions) -> None:
    """Compare cost and result of branch and bound, exhaustive search and Optuna.

    Example: exegpt reproduce search-cost --exhaustive-points 1000000
    """
    from exegpt.reproduction import search_cost as cost

    most = cost.EXHAUSTIVE_POINTS if options.exhaustive_points is None else options.exhaustive_points
    _show("search-cost", lambda progress: cost.reproduce(most, progress), cost.sections, options)


@app.command(short_help="Several models at once, by SamuLLM.")
@command
def samullm(options: ReproduceOptions) -> None:
    """Plan SamuLLM's applications of several models in stages, and compare them with its baseline heuristics.

    Needs SamuLLM's published measurements, in the folder $EXEGPT_DATA/samullm/.

    Example: exegpt reproduce samullm --report samullm.html
    """
    from exegpt.reproduction import samullm as paper

    _show("samullm", paper.reproduce, paper.sections, options, paper.STANDS_ON)


@app.command(short_help="Several models on shared GPUs, by MuxServe.")
@command
def muxserve(options: ReproduceOptions) -> None:
    """Replay MuxServe's 20 published workloads of 19 models at its placements.

    Models run on shares of GPUs, by time sharing, and on dedicated GPUs.

    Needs MuxServe's published measurements, in the folder $EXEGPT_DATA/muxserve/.

    Example: exegpt reproduce muxserve --report muxserve.html
    """
    from exegpt.reproduction import muxserve as paper

    _show("muxserve", paper.reproduce, paper.sections, options, paper.STANDS_ON)


@app.command("learned-order", short_help="vLLM-LTR: requests in the order of a learned rank.")
@command
def learned_order(options: ReproduceOptions) -> None:
    """Compare requests in the order of a learned rank with other orders, over arrival rates.

    These are first come, first served, MLFQ, a classifier's order and oracles.

    Example: exegpt reproduce learned-order --json
    """
    from exegpt.reproduction import learned_order as paper

    _show("learned-order", paper.reproduce, paper.sections, options)


@app.command(short_help="Hermes: applications ordered by demand graphs.")
@command
def hermes(options: HermesOptions) -> None:
    """Simulate Hermes' applications on one LLM: orders, deadlines, ablations, caches and the prewarming knob.

    Example: exegpt reproduce hermes --graphs pdgraphs.json
    """
    from exegpt.reproduction import hermes as paper
    from exegpt.reproduction.hermes_sections import sections

    work = lambda progress: paper.reproduce(progress, options.graphs)  # noqa: E731
    _show("hermes", work, sections, options, paper.STANDS_ON)


@app.command(short_help="SeaLLM: services that share GPUs, for latency.")
@command
def seallm(options: SeaLLMOptions) -> None:
    """Compare SeaLLM's placement, order and replacement with dedicated GPUs, AlpaServe and MuxServe.

    Sixteen services run on 32 A800, at several rates and burstiness levels. The command takes many minutes.

    Example: exegpt reproduce seallm --report seallm.html
    """
    from exegpt.reproduction import seallm as paper

    work = lambda progress: paper.reproduce(progress, options.sweeps)  # noqa: E731
    _show("seallm", work, paper.sections, options, paper.STANDS_ON)


@app.command(short_help="All papers about several models on one cluster.")
@command
def multimodel(options: ReproduceOptions) -> None:
    """Reproduce MuxServe, SamuLLM, Hermes, vLLM-LTR and SeaLLM, one after the other; this takes many minutes.

    Needs the published measurements in the folder $EXEGPT_DATA.

    Example: exegpt reproduce multimodel --report multimodel.html
    """
    from exegpt.reproduction import multimodel as papers

    _show("multimodel", papers.reproduce, papers.sections, options, papers.STANDS_ON)


def _gains(name: str, options: GainsOptions) -> None:
    from exegpt.reproduction import gains

    figures = tuple(gains.FIGURES) if options.over_all else (name,)
    which = figures, options.model, options.workload
    _show(name, lambda progress: gains.reproduce(*which, progress), gains.sections, options)


def _show(
    name: str,
    work: "Callable[[Callable[[int, int], None]], Any]",
    sections: "Callable[[Any], list[Section]]",
    options: ReproduceOptions,
    stands_on: str = STANDS_ON,
) -> None:
    """Run `work`, then print its sections or its document, and write the page."""
    from exegpt.report.sections import page
    from xcore import document
    from xcore.console import output
    from xcore.files import check_output

    check_output(options.report)
    with output.progress(name) as progress:
        result = work(progress)
    shown = sections(result)
    if options.report:
        document.write_text(options.report, page(f"{name} of the paper, reproduced", (stands_on,), shown))
    if options.json:
        return output.emit({"reproduces": name, **asdict(result), "provenance": output.provenance()})
    output.note(f"· {stands_on}")
    for section in shown:
        output.table(section.columns, section.rows, section.title)
        for note in section.notes:
            print(note)
        print()
