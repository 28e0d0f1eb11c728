"""`exegpt serve`: an OpenAI-compatible server that keeps a latency bound."""

import os
from pathlib import Path
from typing import Annotated

import typer

from exegpt.cli import options
from exegpt.errors import InputError


def serve(
    model: Annotated[Path, typer.Option("--model", "-m", help="A model directory with a tokenizer.json.")],
    schedule: Annotated[
        Path | None, typer.Option("--schedule", "-s", help="A schedule file. Default: profile, then search.")
    ] = None,
    latency_bound: Annotated[
        str | None, typer.Option("--latency-bound", "-l", help=options.LATENCY_BOUND_HELP + " Default: none.")
    ] = None,
    workload: options.WORKLOAD = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the engine, one per device, under mpirun.")] = 1,
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback need keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="Default: the directory's name.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A Jinja file in place of the model's own chat template.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A key per line. Default: EXEGPT_API_KEY, if it is set.")
    ] = None,
    allowed_host: Annotated[list[str] | None, typer.Option(help="A further name of this server, without keys.")] = None,
    cors: Annotated[list[str] | None, typer.Option(help="An origin whose pages may use this server.")] = None,
    max_output: Annotated[int | None, typer.Option(min=1, help="The most output tokens of a request.")] = None,
    max_waiting: Annotated[int, typer.Option(min=1, help="The most sequences that wait for the engine.")] = 1000,
    drain_timeout: Annotated[str, typer.Option(help="How long a drain may take.")] = "1m",
    stall_timeout: Annotated[str, typer.Option(help="How long a client may read nothing.")] = "1m",
    policy: options.POLICY = None,
    admission: options.ADMISSION = None,
    device: options.DEVICE = None,
    attention: options.ATTENTION = None,
    dtype: options.RUN_DTYPE = None,
    threads: options.THREADS = None,
) -> int:
    """Serve a model over HTTP as OpenAI's API does, under the schedule with the highest goodput within a bound.

    Example: exegpt serve --model DIR --latency-bound 5s --workload 512/128
    """
    from exegpt.app.choices import admission_rule, policy_names
    from exegpt.app.files import model_directory, read_schedule
    from exegpt.duration import parse_duration
    from exegpt.server import frontend

    model_directory(str(model))
    if latency_bound:
        parse_duration(latency_bound)
    if policy:
        policy_names(policy)
    admission_rule(admission, read_schedule(schedule).policy if schedule else None)
    given = {
        "--model": model,
        "--schedule": schedule,
        "--latency-bound": latency_bound,
        "--workload": workload,
        "--policy": policy,
        "--admission": admission,
        "--device": device,
        "--attention": attention,
        "--dtype": dtype,
        "--threads": threads,
    }
    asked = frontend.ServerOptions(
        model=model,
        name=served_model_name,
        host=host,
        port=port,
        ranks=ranks,
        api_keys=_keys(api_key_file),
        hosts=tuple(allowed_host or ()),
        origins=tuple(cors or ()),
        max_output=max_output,
        max_waiting=max_waiting,
        drain_timeout_s=parse_duration(drain_timeout) or float("inf"),
        stall_timeout_s=parse_duration(stall_timeout) or float("inf"),
        chat_template=chat_template,
    )
    return frontend.run(
        asked, [text for name, value in given.items() if value is not None for text in (name, str(value))]
    )


def _keys(path: Path | None) -> tuple[str, ...]:
    """The API keys: a file's lines, or the environment's one."""
    if path is None:
        return tuple(filter(None, [os.environ.get("EXEGPT_API_KEY")]))
    if not path.is_file():
        raise InputError(f"There is no file '{path}' of API keys: write one key per line.")
    keys = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    if not keys:
        raise InputError(f"'{path}' has no API key: write one per line.")
    return keys
