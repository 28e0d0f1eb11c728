"""Plans that differ from the greedy's in one stage: the search with one discrepancy (Harvey and Ginsberg, 1995).

A few complete plans of the depth-first branch and bound differ in their last stages only, where little is left to gain;
the greedy, which knows no critical path and not how long loading blocks GPUs, errs in its first ones.
"""

from xscheduler.multimodel.stage_search import lower_bound_s, next_stages
from xscheduler.multimodel.stages import Host, PlannedStage, follow, go_on, greedy_stage, makespan
from xsimulator.multimodel.stages.application import Application
from xsimulator.multimodel.stages.progress import Progress


def varied_stages(
    application: Application, host: Host, top_stages: int | None = 4, preempt: bool = True
) -> tuple[PlannedStage, ...]:
    """The plan that is done first, of the greedy's and of those in which one stage is another of the `top_stages` best
    by throughput (None: of all there are), and the greedy goes on from there.
    """
    progress, before = Progress.beginning(application), tuple[PlannedStage, ...]()
    best = go_on(progress, host, greedy_stage, preempt)
    while progress.unfinished and progress.now + lower_bound_s(progress, host) < makespan(best):
        greedy, *others = next_stages(progress, host, top_stages, preempt)
        for stage in others:
            planned, after = follow(progress, stage)
            plan = (*before, planned, *go_on(after, host, greedy_stage, preempt))
            if makespan(plan) < makespan(best):
                best = plan
        planned, progress = follow(progress, greedy)
        before = (*before, planned)
    return best
