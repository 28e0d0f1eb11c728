"""`exegpt launch`: run the engines of a node of a plan, for `exegpt serve --plan` on another machine."""

import asyncio
import os
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from exegpt.cli.key_files import node_token
from exegpt.options.option_record import command, option
from exegpt.options.values import node_directories
from xcore.console.output import LOG_FORMAT
from xcore.errors import InputError
from xcore.frozen_heap import imports

if TYPE_CHECKING:
    from xserver.nodes.launcher import LauncherOptions


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Where a launcher listens, and its directories of models."""

    listen: str = option("127.0.0.1:8100", "The address to listen on, as HOST:PORT. Use a private network.")
    token_file: Path | None = option(
        None, "A file with the token that the server has, too. Default: the environment's EXEGPT_NODE_TOKEN, if set."
    )
    model: list[str] | None = option(
        None, "NAME=DIR: this node's directory of a model. Default: the same path as on the server. Repeat it.", "-m"
    )
    log_format: str = option("text", "The log's format: text, or json (one JSON line per event on standard error).")


@command
def launch(options: LaunchOptions) -> int:
    """Start and end engines on this node for a server elsewhere that has the token, until a signal ends it.

    The server runs `exegpt serve --plan`, with this node's address in --node.

    Example: exegpt launch --listen 10.0.0.2:8100 --token-file token --model chat=models/chat
    """
    with imports():
        from exegpt.cli.node_addresses import host_and_port
        from xserver.nodes.launcher import LauncherOptions

    if options.log_format not in ("text", "json"):
        raise InputError(f"--log-format '{options.log_format}' is not known: use text or json.")
    os.environ[LOG_FORMAT] = options.log_format
    models = {name: Path(path).absolute() for name, path in node_directories(options.model).items()}
    if missing := next((path for path in models.values() if not path.is_dir()), None):
        raise InputError(f"There is no directory '{missing}': correct --model.")
    host, port = host_and_port(options.listen, "--listen")
    asyncio.run(_run(LauncherOptions(host, port, node_token(options.token_file, "--token-file"), models)))
    return 0


async def _run(options: "LauncherOptions") -> None:
    from xserver.nodes.launcher import Launcher

    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    # mode 0700: only this user can access its engines' sockets
    with tempfile.TemporaryDirectory(prefix="exegpt-launch-", ignore_cleanup_errors=True) as directory:
        await Launcher(options, Path(directory)).run(ended)
