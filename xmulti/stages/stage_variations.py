"""Plans that differ from the greedy plan in one stage: limited discrepancy search with one discrepancy.

See Harvey and Ginsberg, 1995. The few complete plans of the depth-first branch and bound differ only in their last
stages, where little can be gained. The greedy search errs in the first stages: it ignores the critical path, and how
long loading blocks GPUs.
"""

from xmulti.stages.application import Application
from xmulti.stages.greedy_stages import Host, PlannedStage, follow, go_on, greedy_stage, makespan
from xmulti.stages.stage_progress import Progress
from xmulti.stages.stage_search import lower_bound_s, next_stages


def varied_stages(
    application: Application, host: Host, top_stages: int | None = 4, preempt: bool = True
) -> tuple[PlannedStage, ...]:
    """Return the plan that completes first: the greedy plan, or one with a single different stage.

    That stage is one of the `top_stages` best by throughput (None: any); the plan continues greedily.
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
