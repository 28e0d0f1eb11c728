"""`exegpt plan --method samullm`: an application's models in stages."""

from exegpt.options.plan import PlanOptions


def plan_stages(options: PlanOptions) -> int:
    """Plan an application file, print its stages and the heuristics' times, and write plan and report; exit code 0."""
    from exegpt.cli.plan_report import write_stages_report
    from exegpt.cli.plan_tables import others_text, print_plan
    from xcore import document
    from xcore.console import output
    from xmulti.files.application_file import read_application
    from xmulti.stages.stage_planning import METHODS, propose_stages

    asked = read_application(options.file, options.cluster, profile=options.profile or (), **options.setting)
    proposals = propose_stages(asked, options.method if options.method in METHODS else "samullm")
    best = proposals[0]
    if options.out:
        document.write(options.out, best.plan)
    if options.report:
        write_stages_report(options.report, proposals, asked.assumptions)
    if options.json:
        methods = [{"method": p.method, "seconds": p.plan.seconds, "search_s": p.plan.search_s} for p in proposals]
        facts = {"plan": document.to_dict(best.plan), "methods": methods, "assumptions": list(asked.assumptions)}
        imports = {name: s.kernels.to_dict() for name, s in asked.settings.items() if s.kernels}
        output.emit({**facts, "profile_imports": imports, "provenance": output.provenance(seed=0)})
        return 0
    output.notes(asked.assumptions)
    print_plan(best.plan)
    for text in others_text(proposals):
        output.note(text)
    if options.out:
        print(f"Plan written to {options.out}.")
    return 0
