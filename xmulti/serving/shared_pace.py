"""SharedPace: the pace of a model that takes turns with other models on the same devices.

A cycle decodes one iteration of each model with running sequences, so each running sequence of every model gets one
token per cycle. The seconds of a cycle are the sum of the models' parts. A part contains the model's iteration, and the
prefills of the sequences that take the places of ended ones.

The slowdown is measured without prefills: the time of completed prefills is subtracted. When an overload begins,
prefills take a much larger share of the time than in an average cycle.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from xcore.specs.profile import Profile
from xcore.specs.schedule import Schedule
from xmulti.sharing.replay import ModelLoad
from xserver.admission.pace import LoadPoint, Pace
from xsimulator.cost.cost_model import ReplicaCost


class SharedPace(Pace):
    """The pace of one model of a unit. `load` has the costs of its iterations there."""

    def __init__(
        self, schedule: Schedule, cost: ReplicaCost, profile: Profile, load: ModelLoad, overhead: float, now_s: float
    ):
        """Predict the model's part of a cycle; `overhead`: the factor by which all iterations take longer."""
        lengths = schedule.workload
        mean_input, mean_output = round(lengths.input.mean), lengths.output.mean
        prefill_s = overhead * load.cost.prefill_seconds([mean_input], load.limits.prefill_share)
        context = np.array([mean_input + mean_output / 2])
        held = load.pool.blocks_for(round(mean_input + mean_output / 2))
        most = max(1, min(load.limits.most_running, load.pool.total // held))
        points: list[LoadPoint] = []
        for running in sorted({*(2**i for i in range(most.bit_length())), most}):
            (decode_s,) = load.cost.decode_seconds(running, context, load.limits.decode_share)
            iteration_s, begun = overhead * float(decode_s), running / max(1.0, mean_output - 1)
            points.append((float(running), prefill_s, iteration_s + begun * prefill_s, iteration_s))
        super().__init__(schedule, cost, profile, now_s, points)
        self._limits, self._overhead, self._iterations = load.limits, overhead, load.cost
        self.switch_s = overhead * load.switch_s
        """Extra seconds of its iteration after another model's."""
        self.waiting_s = 0.0
        """Seconds of the prefills of the other models' waiting prompts."""
        self.other_iterations_s = 0.0
        """Predicted seconds of the other models' iterations in a cycle, and of the switches between models."""
        self.prefilled_s = 0.0
        """Seconds of all models' prefills since the last record."""

    def passed(self, load: int, now_s: float, prefilled_s: float) -> None:
        """Record that `load` sequences share the engine from now on, and that prefills have taken so many seconds."""
        self.prefilled_s = prefilled_s
        self.shared_by(load, now_s)
        self.prefilled_s = 0.0

    def _work_within(self, seconds: float, load: int) -> float:
        """Return the work of the time without all models' prefills, by the time of a cycle's iterations."""
        return (seconds - self.prefilled_s) / (self._iteration_s(load) + self.other_iterations_s)

    def part_s(self, load: float) -> float:
        """Return the predicted seconds of this model's part of a cycle, with the switch to it; 0 without sequences."""
        return self._predicted_s(load) - self.others_s + self.switch_s if load else 0.0

    def iteration_s(self, load: int) -> float:
        """Return the predicted seconds of this model's iteration in a cycle, with the switch to it."""
        return self._iteration_s(load) + self.switch_s if load else 0.0

    def _iteration_s(self, load: int) -> float:
        _, alone_s, *_ = self._rows[min(load, len(self._rows) - 1)]
        return alone_s

    def prefills_s(self, prompts: Sequence[int]) -> float:
        """Return the seconds of prompts' prefills, by their tokens; as many at once as the model's limits let."""
        share = self._limits.prefill_share
        seconds = sum(self._iterations.prefill_seconds(job, share) for job in self._limits.together(prompts))
        return self.scale(1) * self._overhead * seconds

    @contextmanager
    def slower_by(self, seconds: float) -> Iterator[None]:
        """Let each cycle take longer by these seconds, within the context."""
        before, self.others_s = self.others_s, self.others_s + seconds
        try:
            yield
        finally:
            self.others_s = before

    def first_s(self, load: float) -> float:
        """Return the seconds from a sequence's start to its first token, after the other models' waiting prompts."""
        return super().first_s(load) + self.waiting_s
