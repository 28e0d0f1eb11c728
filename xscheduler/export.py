"""Convert schedules to launch commands of another engine, and predict its performance."""

from dataclasses import dataclass, replace

from xcore.errors import InputError
from xcore.policies import TRAITS, runs
from xcore.quantity import figure_text
from xcore.specs.engine_spec import engine_of
from xcore.specs.estimate import Estimate
from xcore.specs.profile import Profile
from xcore.specs.schedule import BLOCK_SIZE, Schedule
from xscheduler.exports.compose_file import compose_text
from xscheduler.exports.container_parts import Deployed, check_device
from xscheduler.exports.kubernetes_manifest import kubernetes_text
from xscheduler.exports.launch_parts import EngineLaunch, Start, hub_name
from xscheduler.exports.sglang_launch import SglangLaunch
from xscheduler.exports.tensorrt_llm_launch import TensorrtLlmLaunch
from xscheduler.exports.vllm_launch import VllmLaunch
from xscheduler.settings import Setting

_LAUNCHES: dict[str, EngineLaunch] = {
    launch.engine: launch for launch in (VllmLaunch(), SglangLaunch(), TensorrtLlmLaunch())
}
ENGINES = tuple(_LAUNCHES)
_FORMS = {"kubernetes": kubernetes_text, "compose": compose_text}
FORMS = ("command", *_FORMS)


@dataclass(frozen=True)
class Export:
    """An engine's launch commands, and its predicted performance."""

    start: Start
    """The commands, or the file, that start the engine."""
    schedule: Schedule
    """The schedule that the engine follows: it uses all its memory and its own admission rule."""
    estimate: Estimate
    """The estimate of `schedule`."""
    notes: tuple[str, ...]
    text: str
    """The commands for a shell, or the file that starts containers."""

    @property
    def commands(self) -> tuple[str, ...]:
        """Return one command per node of a replica."""
        return tuple(command.text for command in self.start.commands)


@dataclass(frozen=True)
class Target:
    """Another engine (one of ENGINES), and the directory in which it finds the model, if the model has one."""

    engine: str
    weights: str | None = None
    form: str = "command"
    """The form of the start, one of FORMS."""

    @property
    def launch(self) -> EngineLaunch:
        """Return how the engine is started."""
        return _LAUNCHES[self.engine]

    def check(self, setting: Setting, policies: tuple[str, ...], drafts: bool = False) -> None:
        """Raise InputError for a setting that the engine can't run.

        Also raises it if the predictions are for another engine, if the engine runs none of the policies, or if tokens
        are drafted (`drafts`) and its flags for this aren't known.
        """
        model, predicted = setting.model, engine_of(setting.profile).name
        if model.architecture == "t5":
            raise InputError(f"{self.engine} can't run encoder-decoder models like '{model.name}': leave --export out.")
        if not predicted.startswith(self.engine):
            raise InputError(
                f"--export {self.engine} prints flags with the predicted performance of {self.engine}, but the "
                f"predictions are for engine {predicted}: pass --engine {self.engine}, or leave --export out."
            )
        if not any(runs(self.engine, policy) for policy in policies):
            known = ", ".join(policy for policy in TRAITS if runs(self.engine, policy))
            raise InputError(
                f"--export {self.engine} needs a policy that {self.engine} runs ({known}), but --policy has only "
                f"{', '.join(policies)}: add one of them, or leave --policy out."
            )
        if drafts and not self.launch.drafts:
            raise InputError(
                f"The export to {self.engine} has no keys for speculative decoding: leave --draft-acceptance out, or "
                "pass --export vllm or sglang."
            )
        self.launch.check(model, setting.profile.dtype, setting.kv_dtype)
        if self.form != "command":
            check_device(setting.cluster.device.kind, self.form)

    def follows(self, schedule: Schedule, profile: Profile) -> Schedule:
        """Return the schedule that the engine follows with a schedule's flags."""
        from xsimulator.cost.cost_model import ReplicaCost

        followed = self.launch.followed(schedule)
        step = float(followed.control.limit), float(followed.control.batch)
        blocks = ReplicaCost.of(followed, profile).room(step) * BLOCK_SIZE // followed.block_size
        return replace(followed, kv_blocks=blocks)

    def export(self, followed: Schedule, estimate: Estimate, alike: bool = False) -> Export:
        """Return the commands that make the engine follow a schedule (from `follows`) with this estimate.

        With `alike`, the prediction assumes that prompts share prefixes as in the workload.
        """
        _, length = self._longest(followed)
        cached = (
            "prompts share prefixes as in the workload"
            if alike
            else "no prompts share a prefix, so reuse can only improve on it"
        )
        # Kubernetes spreads requests over pods, so each replica gets one.
        shared = followed.model.spec.attention_dp
        start = self.start(followed, shared if self.form == "kubernetes" else self.launch.together(followed))
        caching = f"prefix caching: on, the default of {self.engine}; the prediction assumes that {cached}"
        if self.form == "command":
            return Export(start, followed, estimate, (*start.notes, length, caching), _script(start))
        rate = f"{figure_text(estimate.throughput_seq_s)} requests/s are predicted for {followed.workload.name}"
        model = self.model_of(followed)
        comments = (f"{model} on {followed.cluster.name}: {rate}", length, caching)
        deployed = Deployed(self.engine, model, start, comments)
        return Export(start, followed, estimate, (length, caching), _FORMS[self.form](deployed))

    def start(self, followed: Schedule, together: int) -> Start:
        """Return what starts `together` replicas of a schedule from `follows`."""
        return self.launch.start(followed, self.model_of(followed), self._longest(followed)[0], together)

    def model_of(self, schedule: Schedule) -> str:
        """Return the directory of the model, or its name on the hub."""
        return self.weights or hub_name(schedule.model.spec.name)

    def _longest(self, schedule: Schedule) -> tuple[int, str]:
        """Return the tokens of the longest accepted request, and the reason for it.

        The engine serves only what its KV cache holds of one request.
        """
        context, held = schedule.model.spec.context, schedule.kv_blocks * schedule.block_size
        flag = self.launch.length_flag
        if held >= context:
            return context, f"{flag} {context} is the model's context"
        return held, (
            f"{flag} {held} is the number of tokens that fit in the KV cache; the model's context has {context:,}"
        )


def _script(start: Start) -> str:
    """Return the commands, one per line, after the lines that write the files that they read."""
    files = (f"cat > {name} <<'EOF'\n{text.rstrip()}\nEOF" for name, text in start.files.items())
    return "\n".join((*files, *(command.text for command in start.commands)))
