"""Fitting a workload to a model's context."""

from dataclasses import replace

from xcore.errors import InputError
from xcore.quantity import figure_text, percent_text
from xcore.specs.model import ModelSpec
from xcore.specs.workload import Workload

MUCH_LEFT_OUT = 0.05
"""Share of left-out rows above which the note is a warning."""


def fit_context(workload: Workload, model: ModelSpec, scale: bool = False) -> tuple[Workload, list[str]]:
    """Fit a workload as `fit_to_context` does, if the model has a longest request."""
    longest = model.longest_request
    return (workload, []) if longest is None else fit_to_context(workload, longest, model.name, scale)


def fit_to_context(workload: Workload, tokens: int, model: str, scale: bool = False) -> tuple[Workload, list[str]]:
    """Fit a workload to a context of `tokens` tokens; return it with a sentence about each change.

    Longer rows of a trace are left out. Tasks, and with `scale` traces, are scaled if their 99th percentile doesn't
    fit. The workload's name also describes the change.

    Raises:
        InputError: Fixed lengths don't fit (they are exact requirements, not a sample), or nothing of a trace fits.
    """
    if workload.requests and not scale:
        return _leave_longer_out(workload, len(workload.requests), tokens, model)
    lengths = (workload.input.max, workload.output.max)
    if workload.requests is None and lengths == (workload.input.lengths[0], workload.output.lengths[0]):
        if sum(lengths) > tokens:
            raise InputError(
                f"Requests of {lengths[0]:,} + {lengths[1]:,} = {sum(lengths):,} tokens exceed the context of "
                f"'{model}' ({tokens:,} tokens): shorten them, or use a model with a longer context."
            )
        return workload, []
    scaled, factor, clipped = workload.scaled_to(tokens)
    if factor == 1.0 and not clipped:
        return workload, []
    context = f"the context of {tokens:,} tokens"
    if factor == 1.0:
        named = replace(scaled, name=f"{workload.name} clipped to {tokens:,} tokens")
        return named, [f"{percent_text(clipped)} of the requests are longer than {context} and are clipped"]
    named = replace(scaled, name=f"{workload.name} × {figure_text(factor)}")
    text = f"the lengths of workload {workload.name} are multiplied by {figure_text(factor)} to fit {context}"
    rest = f"; {percent_text(clipped)} of the requests are still too long and are clipped" if clipped else ""
    return named, [text + rest]


def _leave_longer_out(workload: Workload, rows: int, tokens: int, model: str) -> tuple[Workload, list[str]]:
    left = workload.within(tokens)
    if left is None:
        raise InputError(
            f"None of the {rows:,} rows of {workload.name} fits the context of '{model}' ({tokens:,} tokens): use a "
            "model with a longer context, or scale all lengths with --scale-to-context."
        )
    longer = rows - len(left.requests or ())
    if not longer:
        return workload, []
    text = (
        f"{longer:,} of {rows:,} rows of {workload.name} are longer than the context of {tokens:,} tokens and are "
        "left out"
    )
    if longer > MUCH_LEFT_OUT * rows:
        rest = "the remaining rows differ from the recorded workload; --scale-to-context scales all lengths instead"
        text = f"warning: {text}, {percent_text(longer / rows)} of all; {rest}"
    return replace(left, name=f"{workload.name} up to {tokens:,} tokens"), [text]
