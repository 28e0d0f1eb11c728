"""Parts of Kubernetes manifests and compose files: images, names, ports, and the form of their YAML."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xcore.errors import InputError
from xscheduler.exports.launch_parts import Start

IMAGES = {
    "vllm": "vllm/vllm-openai:v0.33.0",
    "sglang": "lmsysorg/sglang:v0.5.23",
    "tensorrt-llm": "nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc22",
}
"""Each engine's image with the release whose flags are exported. No image was pulled."""
PORT = 8000
CONFIG_FOLDER = "/config"
CACHE_FOLDER = "/root/.cache/huggingface"
SHARED_MEMORY_GIB = 16
"""Room of /dev/shm, in which the ranks of a container exchange data; a container has 64 MiB by default."""
_LONGEST_NAME = 50


@dataclass(frozen=True)
class Deployed:
    """An engine's start, to be put into containers."""

    engine: str
    model: str
    """The name or the directory of the checkpoint."""
    start: Start
    comments: tuple[str, ...]
    """Sentences for the head of the file."""

    @property
    def name(self) -> str:
        """Return a name that Kubernetes accepts, like `vllm-llama-3-1-8b`."""
        last = self.model.rstrip("/").rpartition("/")[2]
        whole = re.sub(r"[^a-z0-9]+", "-", f"{self.engine}-{last}".lower())
        return whole[:_LONGEST_NAME].strip("-")

    @property
    def folder(self) -> str | None:
        """Return the absolute path of the checkpoint's directory; None for a name on the Hugging Face hub."""
        return str(Path(self.model).resolve()) if Path(self.model).is_dir() else None

    def words(self, rank: int = 0, port: int = PORT) -> list[str]:
        """Return the words of a node's command, which listens on all addresses of its container."""
        listen = ["--host", "0.0.0.0", "--port", str(port)]
        said = [self.folder if self.folder and word == self.model else word for word in self.start.commands[rank].words]
        return [*said, *listen]


def check_device(kind: str, form: str) -> None:
    """Raise InputError for GPUs without an image here; `form` is what the containers are started by."""
    if kind.startswith("MI"):
        raise InputError(
            f"--export-as {form} knows images for NVIDIA's GPUs only, not for {kind}: leave it out, and put the "
            "command into an image of your own."
        )


def yaml_text(documents: Sequence[dict[str, object]], comments: Sequence[str]) -> str:
    """Return YAML documents after lines of comments, with texts of several lines as blocks."""
    import yaml

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    dumper = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})  # shared parts are written in full
    yaml.add_representer(str, text, Dumper=dumper)
    head = "".join(f"# {line}\n" for line in comments)
    return head + "---\n".join(yaml.dump(each, Dumper=dumper, sort_keys=False, width=1000) for each in documents)
