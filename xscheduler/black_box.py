"""Optuna's black-box search, the alternative that the paper names: it makes no use of monotonicity."""

import warnings

from xscheduler.space import Incumbent, Space

TRIALS = 200


def black_box(spaces: list[Space], incumbent: Incumbent) -> None:
    """Search all spaces together with a limited number of trials and leave the best feasible point in `incumbent`."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def objective(trial: "optuna.Trial") -> float:
        space = spaces[trial.suggest_int("space", 0, len(spaces) - 1)]
        point = tuple(
            trial.suggest_int(f"{space.name}.{v.name}", 0, len(v.values) - 1) if len(v.values) > 1 else 0
            for v in space.variables
        )
        incumbent.offer(space, point)
        evaluated = space.at(point)
        excess = [f - c.limit for f, c in zip(evaluated.figures, space.constraints, strict=True)]
        trial.set_user_attr("excess", [max(min(e, 1e30), -1e30) for e in excess] + [0.0] * (most - len(excess)))
        return evaluated.throughput

    most = max(len(space.constraints) for space in spaces)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Optuna 5 recommends another API, which Optuna 4 lacks
        sampler = optuna.samplers.TPESampler(seed=0, constraints_func=lambda trial: trial.user_attrs["excess"])
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.optimize(objective, n_trials=min(TRIALS, sum(space.size for space in spaces)))
