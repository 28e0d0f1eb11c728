"""`exegpt outputs`: learn the distribution of output lengths from a log of answers."""

from dataclasses import dataclass
from pathlib import Path

from exegpt.options.option_record import argument, command, required
from exegpt.options.shared_options import JsonOption


@dataclass(frozen=True, kw_only=True)
class LearnOutputsOptions(JsonOption):
    """The log of answers, and the file of the distribution."""

    log: Path = argument("A JSONL file with a finish_reason and output_tokens (or output_ids) on each line.")
    out: Path = required("Write the distribution of output lengths to this file (JSON).", "-o")


@command
def learn(options: LearnOutputsOptions) -> None:
    """Learn output lengths from answers of which some were cut off (finish_reason length or cancelled).

    The file is read by the key outputs of an application's node (`exegpt plan application.yaml`).

    Example: exegpt outputs learn results.jsonl --out outputs.json
    """
    from dataclasses import asdict

    from xcore import document
    from xcore.console import output
    from xcore.files import check_distinct, check_output
    from xcore.quantity import counted, percent_text
    from xmulti.stages.output_lengths import learn_outputs

    check_output(options.out)
    check_distinct((options.out,), (options.log,))
    learned = learn_outputs(options.log)
    document.write(options.out, learned.distribution)
    mean, p99 = learned.distribution.mean, learned.distribution.quantile(0.99)
    if options.json:
        facts = {"ended": learned.ended, "cut_off": learned.cut, "beyond": learned.beyond, "mean": mean, "p99": p99}
        return output.emit({**facts, **asdict(learned.distribution), "provenance": output.provenance()})
    of = f"{counted(learned.ended, 'finished answer')} and {learned.cut:,} that were cut off"
    if learned.beyond > 0:
        longest = f"{learned.distribution.lengths[-1]:,} tokens"
        output.note(
            f"{percent_text(learned.beyond)} of the outputs are longer than all that finished, and count as {longest}: "
            "collect answers with a higher limit"
        )
    print(f"{options.out}: output lengths of {of}; mean {mean:.1f}, 99th percentile {p99:,} tokens.")
