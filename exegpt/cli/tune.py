"""`exegpt tune`: the schedule with the highest throughput under a latency bound."""

from exegpt.options.option_record import command
from exegpt.options.tune import TuneOptions


@command
def tune(options: TuneOptions) -> int:
    """Find the schedule with the highest throughput under a latency bound.

    Example: exegpt tune --latency-bound 5s --model llama-3.1-8b --cluster 1xH100-SXM --workload 2048/256

    With --rate, requests arrive over time and latency counts from arrival. With several clusters, separated by commas,
    and --price, the answer is the cheapest cluster that sustains the rate.

    Several bounds and rates give an answer for each pair.

    Example: exegpt tune --latency-bound 2s,4s --rate 5/s,10/s --model llama-3.1-8b --cluster 2xH100-SXM

    With --devices any, the answer is how many of which GPU sustain the rate.

    Example: exegpt tune --ttft 1s --tpot 50ms --rate 50/s --devices any --model llama-3.1-8b --workload 2048/256

    With --load-curve, it also has the replicas of each hour.

    Example: exegpt tune --latency-bound 5s --load-curve day.csv --devices any --price prices.yaml

    A control variable that you pass keeps its value. Policies without this variable are left out.

    Example: exegpt tune --ttft 1s --model llama-3.1-8b --cluster 1xH100-SXM --max-num-seqs 64

    Example: exegpt tune --latency-bound 5s --rate 20/s --cluster 2xA40,4xA40,1xH100-SXM --price prices.yaml

    Example: exegpt tune --ttft 1s --rate 5/s --workload trace.jsonl --admission grow --prefix-caching

    With --agents, each of so many sessions sends its next turn when the last one has ended, after its tool's time. The
    answer is the schedule of the highest turn throughput, and the most agents that keep the bounds with it.

    Example: exegpt tune --agents 200 --turns 8 --tool-time 2s --ttft 10s --model llama-3.1-8b --cluster 1xH100-SXM

    With --export, the answer ends with what starts another engine.

    Example: exegpt tune --ttft 1s --model llama-3.1-8b --cluster 8xH100-SXM --export sglang --export-as kubernetes
    """
    from exegpt.api.tuning import read_problem
    from exegpt.cli import bounded, rated
    from xrunner.threads import set_threads

    set_threads(options.threads)
    problem = read_problem(options)
    if options.agents:
        from exegpt.cli import agent_output

        return agent_output.answer(problem)
    if options.devices:
        from exegpt.cli import device_answer

        return device_answer.answer(problem)
    return rated.answer(problem) if problem.open_system else bounded.answer(problem)
