"""`exegpt plan`: several models on one cluster."""

from typing import TYPE_CHECKING

from exegpt.cli import INFEASIBLE
from exegpt.options.option_record import command
from exegpt.options.plan import PlanOptions
from exegpt.options.values import profile_files
from xcore.errors import InputError

if TYPE_CHECKING:
    from xcore.specs.price import Prices
    from xmulti.plans.plan_answer import PlanAnswer
    from xmulti.plans.planning import Proposal


@command
def plan(options: PlanOptions) -> int:
    """Divide a cluster's devices among several models, so that each meets its latency bound at its request rate.

    Example: exegpt plan models.yaml --cluster 4xA100-80GB --method best

    Example: exegpt plan models.yaml --cluster 4xH200-SXM --profile chat=chat.json --profile code=code.json

    Example: exegpt plan application.yaml --cluster 8xA100-80GB --method samullm
    """
    from exegpt.cli.plan_report import write_plan_report
    from xcore import document
    from xcore.choices import check_choice
    from xcore.console import output
    from xcore.files import check_distinct, check_output
    from xcore.specs.price import read_prices
    from xmulti.files.models_file import is_application
    from xmulti.plans.plan_answer import answer
    from xmulti.plans.planning import METHODS
    from xmulti.stages.stage_planning import METHODS as STAGE_METHODS
    from xrunner.threads import set_threads
    from xscheduler.settings import threads_of_device

    check_output(options.out)
    check_output(options.report)
    file, cluster, method = options.file, options.cluster, options.method
    check_distinct((options.out, options.report), (file, cluster, options.price, *profile_files(options.profile)))
    prices = read_prices(options.price) if options.price else None
    check_choice(method, (*METHODS, *STAGE_METHODS, "best"), "--method")
    set_threads(options.threads or threads_of_device(cluster))
    if options.replicas is not None and method not in ("exegpt", "seallm", "alpaserve", "best"):
        raise InputError(f"--replicas is for methods that place replicas, and {method} doesn't: leave it out.")
    if method in STAGE_METHODS or (method == "best" and is_application(document.read_yaml(file, "models"))):
        from exegpt.cli.plan_stages import plan_stages

        budgets = ("--advice", options.advice), ("--price", prices), ("--replicas", options.replicas)
        if option := next((name for name, value in (*budgets, ("--one-node", options.one_node)) if value), None):
            raise InputError(f"{option} applies to plans of budgets, and this is a plan of stages: leave it out.")
        return plan_stages(options)
    asked = (options.advice, prices, options.profile or (), options.replicas, options.one_node)
    answered = answer(file, cluster, method, *asked, **options.setting)
    if answered.best and options.out:
        document.write(options.out, answered.best)
    if options.report:
        write_plan_report(options.report, answered.proposals, answered.advice, prices, answered.assumptions)
    if options.json:
        output.emit(_document(answered, prices))
    else:
        _print(answered, prices, options.advice)
        if answered.best and options.out:
            print(f"Plan written to {options.out}.")
    return 0 if answered.best else INFEASIBLE


def _document(answered: "PlanAnswer", prices: "Prices | None") -> dict[str, object]:
    """Return the object that `plan --json` prints."""
    from dataclasses import asdict

    from xcore.console import output
    from xcore.document import to_dict

    best, proposals, calls = answered.best, answered.proposals, answered.calls
    pairs = zip(answered.gains, answered.advice, strict=True)
    return {
        "plan": to_dict(best) if best else None,
        "methods": [_method(proposal, prices) for proposal in proposals],
        "why": proposals[0].why_before(proposals[1]) if best and len(proposals) > 1 else None,
        "application": {"calls": len(calls.finish_s), "seconds": calls.seconds} if calls else None,
        "advice": [asdict(gain) | {"text": text} for gain, text in pairs],
        "profile_imports": {name: kernels.to_dict() for name, kernels in answered.imports.items()},
        "assumptions": answered.assumptions,
        "provenance": output.provenance(),
    }


def _method(proposal: "Proposal", prices: "Prices | None") -> dict[str, object]:
    from exegpt.cli.plan_tables import price_in_use
    from xcore.document import to_dict

    plan = proposal.found
    return {
        "method": proposal.method,
        "plan": to_dict(plan) if plan else None,
        "reason": proposal.why_not,
        "seconds": proposal.seconds,
        "gpu_hours": proposal.gpu_hours,
        "price_per_hour": price_in_use(plan, prices) if plan else None,
    }


def _print(answered: "PlanAnswer", prices: "Prices | None", advice: bool) -> None:
    """Print the best plan, all methods' results, why the best one is best, and advice."""
    from xcore.console import output
    from xcore.duration import duration_text
    from xcore.quantity import counted

    output.notes(answered.assumptions)
    _print_methods(answered.proposals, prices)
    if calls := answered.calls:
        done = f"finish in {duration_text(calls.seconds)}, each after the calls whose outputs it reads"
        print(f"{counted(len(calls.finish_s), 'call')} of the application {done}; in the table, all start at once.")
    if answered.gains:
        output.listed("Advice about budgets:" if answered.proposals[0].stages else "Advice:", answered.advice)
    elif advice:
        output.note("· advice: none, because this machine has no other devices and no model has a bound to loosen")
    elif answered.advice_about and (answered.best or answered.now):
        print(f"--advice predicts the effect of {answered.advice_about}.")


def _print_methods(proposals: "list[Proposal]", prices: "Prices | None") -> None:
    """Print the best plan's models, then all methods' results and why the best one is best."""
    from exegpt.cli.plan_tables import methods_table, print_plan, why_best
    from xcore.console import output

    best, *others = proposals
    if best.found is None:
        output.note(best.why_not)
    else:
        print_plan(best.found)
        if best.plan and (spans := [model.name for model in best.plan.models if len(best.plan.nodes_of(model)) > 1]):
            output.note(
                f"{', '.join(spans)}: on several nodes, which `exegpt serve --plan` can't run: for that, plan with "
                "--one-node"
            )
    columns, rows = methods_table(proposals, prices)
    if rows:
        output.table(columns, rows, "methods" if others else "all models together")
    for other in others:
        if other.found is None:
            output.note(f"{other.method}: {other.why_not}")
    if why := why_best(proposals):
        print(f"{why}.")
