"""`exegpt reproduce`: the papers' evaluations, printed next to the published figures."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from exegpt.options.option_record import command, option
from exegpt.options.shared_options import REPORT, JsonOption

if TYPE_CHECKING:
    from exegpt.report.sections import Section
    from exegpt.reproduction.experiments import Experiment, Reproduced

app = typer.Typer(
    help="Reproduce the papers' evaluations: simulated on stock rooflines, printed next to the published figures.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions(JsonOption):
    """The extent and the output of a reproduction."""

    quick: bool = option(False, "Run the part that takes least time, and print what is left out.")
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


@app.command("all", short_help="All papers' tables and figures.")
@command
def all_papers(options: ReproduceOptions) -> None:
    """Reproduce every table and figure, one after the other. With --quick it takes a quarter of an hour on two cores.

    What needs published measurements that aren't in the folder $EXEGPT_DATA is left out, with the reason.

    Example: exegpt reproduce all --quick --report papers.html
    """
    from exegpt.reproduction.experiments import ALL

    _show_each("all", ALL, options)


@app.command(short_help="Table 4: loading models from memory and SSD.")
@command
def table4(options: ReproduceOptions) -> None:
    """Compute the seconds to load large models from host memory and from an SSD, and the rates that the paper implies.

    Example: exegpt reproduce table4
    """
    from exegpt.reproduction import experiments

    _show("table4", experiments.table4(), options)


@app.command(short_help="Table 5: violations of monotonicity.")
@command
def table5(options: ReproduceOptions) -> None:
    """Count how often each control variable breaks the monotonicity of throughput and latency.

    Example: exegpt reproduce table5 --json
    """
    from exegpt.reproduction import experiments

    _show("table5", experiments.table5(), options)


@app.command(short_help="Table 6: OPT-13B at the paper's schedules.")
@command
def table6(options: ReproduceOptions) -> None:
    """Predict OPT-13B on four A40s at the paper's own schedules, and search under the same bounds.

    Example: exegpt reproduce table6 --json
    """
    from exegpt.reproduction import experiments

    _show("table6", experiments.table6(), options)


@app.command(short_help="Table 7: variance of stage times.")
@command
def table7(options: ReproduceOptions) -> None:
    """Replay OPT-13B at the paper's own schedules, and compare how much encoding and decoding times vary.

    Example: exegpt reproduce table7 --quick
    """
    from exegpt.reproduction import experiments

    _show("table7", experiments.table7(), options)


@app.command(short_help="Figure 6: gains of small to mid-sized models.")
@command
def figure6(options: GainsOptions) -> None:
    """Compare the throughput of small to mid-sized models with that of FasterTransformer, under four bounds each.

    Example: exegpt reproduce figure6 --model opt-13b --report figure6.html
    """
    _gains("figure6", options)


@app.command(short_help="Figure 7: FasterTransformer, DSI, ORCA and vLLM.")
@command
def figure7(options: ReproduceOptions) -> None:
    """Compare the throughput of FasterTransformer, DeepSpeed-Inference, ORCA and vLLM, under four bounds each.

    Example: exegpt reproduce figure7 --quick
    """
    from exegpt.reproduction import experiments

    _show("figure7", experiments.figure7(), options)


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
    from exegpt.reproduction import experiments

    _show("figure9", experiments.figure9(), options)


@app.command(short_help="Figure 10: lengths of real data sets.")
@command
def figure10(options: ReproduceOptions) -> None:
    """Compare throughput with FasterTransformer's on public lengths that stand for the paper's data sets.

    Needs these lengths, in the folders $EXEGPT_DATA/lengths/ and $EXEGPT_DATA/measured/.

    Example: exegpt reproduce figure10 --quick
    """
    from exegpt.reproduction import experiments

    _show("figure10", experiments.figure10(), options)


@app.command(short_help="Figure 11: changing output lengths.")
@command
def figure11(options: ReproduceOptions) -> None:
    """Compare an unchanged schedule with a newly searched one when output lengths change.

    Example: exegpt reproduce figure11 --report figure11.html
    """
    from exegpt.reproduction import experiments

    _show("figure11", experiments.figure11(), options)


@app.command("search-cost", short_help="Cost and result of each search method.")
@command
def search_cost(options: SearchCostOptions) -> None:
    """Compare cost and result of branch and bound, exhaustive search and Optuna.

    Example: exegpt reproduce search-cost --exhaustive-points 1000000
    """
    from exegpt.reproduction import experiments

    _show("search-cost", experiments.search_cost(options.exhaustive_points), options)


@app.command(short_help="Several models at once, by SamuLLM.")
@command
def samullm(options: ReproduceOptions) -> None:
    """Plan SamuLLM's applications of several models in stages, and compare them with its baseline heuristics.

    Needs SamuLLM's published measurements, in the folder $EXEGPT_DATA/samullm/.

    Example: exegpt reproduce samullm --report samullm.html
    """
    from exegpt.reproduction import experiments

    _show("samullm", experiments.samullm(), options)


@app.command(short_help="Several models on shared GPUs, by MuxServe.")
@command
def muxserve(options: ReproduceOptions) -> None:
    """Replay MuxServe's 20 published workloads of 19 models at its placements.

    Models run on shares of GPUs, by time sharing, and on dedicated GPUs.

    Needs MuxServe's published measurements, in the folder $EXEGPT_DATA/muxserve/.

    Example: exegpt reproduce muxserve --report muxserve.html
    """
    from exegpt.reproduction import experiments

    _show("muxserve", experiments.muxserve(), options)


@app.command("learned-order", short_help="vLLM-LTR: requests in the order of a learned rank.")
@command
def learned_order(options: ReproduceOptions) -> None:
    """Compare requests in the order of a learned rank with other orders, over arrival rates.

    These are first come, first served, MLFQ, a classifier's order and oracles. For synthetic data, count the answers to
    10,000 prompts at once that are finished in five minutes, and the time to the first 1,000.

    Example: exegpt reproduce learned-order --json
    """
    from exegpt.reproduction import experiments

    _show("learned-order", experiments.learned_order(), options)


@app.command(short_help="Hermes: applications ordered by demand graphs.")
@command
def hermes(options: HermesOptions) -> None:
    """Simulate Hermes' applications on one LLM: orders, deadlines, ablations, caches and the prewarming knob.

    Example: exegpt reproduce hermes --graphs pdgraphs.json
    """
    from exegpt.reproduction import experiments

    _show("hermes", experiments.hermes(options.graphs), options)


@app.command(short_help="SeaLLM: services that share GPUs, for latency.")
@command
def seallm(options: SeaLLMOptions) -> None:
    """Compare SeaLLM's placement, order and replacement with dedicated GPUs, AlpaServe and MuxServe.

    Sixteen services run on 32 A800, at several rates and burstiness levels. The command takes many minutes.

    Example: exegpt reproduce seallm --report seallm.html
    """
    from exegpt.reproduction import experiments

    _show("seallm", experiments.seallm(options.sweeps), options)


@app.command(short_help="All papers about several models on one cluster.")
@command
def multimodel(options: ReproduceOptions) -> None:
    """Reproduce MuxServe, SamuLLM, Hermes, vLLM-LTR and SeaLLM, one after the other; this takes many minutes.

    What needs published measurements that aren't in the folder $EXEGPT_DATA is left out, with the reason.

    Example: exegpt reproduce multimodel --report multimodel.html
    """
    from exegpt.reproduction.experiments import SEVERAL_MODELS

    _show_each("multimodel", SEVERAL_MODELS, options)


def _gains(name: str, options: GainsOptions) -> None:
    from exegpt.reproduction import experiments

    figures = ("figure6", "figure8") if options.over_all else (name,)
    _show(name, experiments.gains(figures, options.model, options.workload), options)


def _show(name: str, experiment: "Experiment", options: ReproduceOptions) -> None:
    """Run an experiment, then print its sections or its document, and write the page."""
    from xcore.console import output
    from xcore.files import check_output

    check_output(options.report)
    with output.progress(name) as progress:
        result = experiment.run(progress, options.quick)
    _write(options, name, _facts(experiment, options), result.sections)
    if options.json:
        return output.emit({"reproduces": name, **result.document, "provenance": output.provenance()})
    _print(experiment, options, result.sections)


def _show_each(name: str, experiments: "dict[str, Callable[[], Experiment]]", options: ReproduceOptions) -> None:
    """Run all experiments, and print each when it is done; instead of one that lacks its data, print the reason."""
    from xcore.console import output
    from xcore.files import check_output

    check_output(options.report)
    facts: list[str] = []
    sections: list[Section] = []
    document: dict[str, object] = {}
    left_out: dict[str, str] = {}
    for place, (each, make) in enumerate(experiments.items(), 1):
        experiment = make()
        result = _result(f"{each} ({place} of {len(experiments)})", experiment, options.quick)
        if isinstance(result, str):
            left_out[each] = result
            output.note(f"· {each} is left out. {result}")
            continue
        document[each.replace("-", "_")] = result.document
        sections += result.sections
        facts += [f"{each}: {fact}" for fact in _facts(experiment, options)]
        if not options.json:
            print(f"\n{each}\n")
            _print(experiment, options, result.sections)
    _write(options, name, (*facts, *(f"{each} is left out. {why}" for each, why in left_out.items())), sections)
    if options.json:
        output.emit({"reproduces": name, **document, "left_out": left_out, "provenance": output.provenance()})


def _result(title: str, experiment: "Experiment", quick: bool) -> "Reproduced | str":
    """Return an experiment's result, or the reason why there is none."""
    from xcore.console import output
    from xcore.errors import InputError

    try:
        with output.progress(title) as progress:
            return experiment.run(progress, quick)
    except InputError as absent:
        return str(absent)


def _facts(experiment: "Experiment", options: ReproduceOptions) -> tuple[str, ...]:
    return (experiment.stands_on, *((experiment.reduction,) if options.quick else ()))


def _print(experiment: "Experiment", options: ReproduceOptions, sections: "list[Section]") -> None:
    from xcore.console import output

    output.note(f"· {experiment.stands_on}")
    if options.quick:
        print(f"{experiment.reduction}\n")
    for section in sections:
        output.table(section.columns, section.rows, section.title)
        if section.text:
            print(f"{section.text}\n")
        for note in section.notes:
            print(note)
        print()


def _write(options: ReproduceOptions, name: str, facts: tuple[str, ...], sections: "list[Section]") -> None:
    from exegpt.report.sections import page
    from xcore import document

    if options.report:
        document.write_text(options.report, page(f"{name} of the paper, reproduced", facts, sections))
