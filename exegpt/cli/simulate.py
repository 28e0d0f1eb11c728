"""`exegpt simulate`: the estimate and timeline of a schedule, or of a running engine's settings."""

from pathlib import Path

from exegpt.options.option_record import command, option_name, typed_options
from exegpt.options.simulate import PlanSimulationOptions, SimulateOptions
from exegpt.options.values import profile_files


@command
def simulate(options: SimulateOptions) -> None:
    """Predict the performance of a schedule or of engine settings: throughput, latencies, memory, and a timeline.

    Example: exegpt simulate --schedule schedule.json --timeline trace.json

    Example: exegpt simulate --command "vllm serve meta-llama/Llama-3.1-8B --max-num-seqs 128" --cluster 1xH100-SXM
    --workload 2048/256 --rate 5/s

    Example: exegpt simulate --plan plan.json --order learned --ranker-tau 0.62

    Example: exegpt simulate --model opt-13b --cluster 4xA40 --policy rra --encode-batch 40 --decode-iterations 16

    Example: exegpt simulate --model llama-3.1-8b --cluster 1xH100-SXM --replay trace.jsonl --prefix-caching --out
    requests.jsonl
    """
    from exegpt.api.simulate import simulate as predict
    from xcore.choices import check_columns
    from xcore.console import output
    from xcore.console.schedule_text import schedule_text
    from xcore.files import check_distinct, check_output
    from xrunner.threads import set_threads

    check_output(options.timeline)
    check_output(options.out)
    inputs = (options.schedule, options.plan, options.workload, options.replay, options.cluster)
    check_distinct((options.timeline, options.out), (*inputs, *profile_files(options.profile)))
    if options.plan:
        return _simulate_plan(options, options.plan)
    set_threads(options.threads)
    check_columns(options.columns, options.workload, options.replay, scale=options.scale_to_context)
    prediction = predict(options)
    if options.json:
        more: dict[str, object] = {"profile_import": prediction.kernels.to_dict() if prediction.kernels else None}
        more |= {"assumptions": prediction.assumptions, "provenance": output.provenance(prediction.profile)}
        if prediction.drafting:
            more["speculation"] = prediction.drafting.document
        return output.emit(prediction.facts | more)
    output.notes(prediction.assumptions)
    output.table(prediction.columns, prediction.rows, schedule_text(prediction.schedule))
    for text in prediction.texts:
        print(text)


def _simulate_plan(options: SimulateOptions, plan: Path) -> None:
    """Print the predicted performance of a plan's models; InputError for options that the plan determines."""
    from xcore.choices import check_columns
    from xcore.columns import parse_columns
    from xcore.console import output
    from xcore.errors import InputError
    from xcore.quantity import counted
    from xmulti.plans.simulate_plan import simulate_plan

    for name in typed_options(options, SimulateOptions):
        if name not in PlanSimulationOptions.__dataclass_fields__:
            raise InputError(f"{option_name(name)} cannot be combined with --plan: leave one of the two out.")
    replay, scale = Path(options.replay) if options.replay else None, options.scale_to_context
    check_columns(options.columns, options.replay, scale=scale)
    columns = parse_columns(options.columns) if options.columns else None
    order = options.order, options.ranker_tau
    prediction = simulate_plan(plan, replay, options.timeline, options.profile or (), columns, scale, *order)
    if options.json:
        facts = {**prediction.facts, "assumptions": prediction.assumptions, "provenance": output.provenance()}
        return output.emit(facts)
    output.notes(prediction.assumptions)
    title = f"{prediction.plan.method}: {counted(len(prediction.rows), 'model')} on {prediction.plan.cluster.name}"
    output.table(prediction.columns, prediction.rows, title)
