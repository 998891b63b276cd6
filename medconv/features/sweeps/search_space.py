"""What a search varies: the overrides with several values, as distributions of Optuna."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from medconv.config import ConfigError
from medconv.config.compose import Composed
from medconv.features.sweeps.job import key

Compose = Callable[[list[str]], Composed]
COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, ConfigError)
# Random points of the space: if none of them composes, the mistake is not in a combination.
_MAX_COMPOSED = 10


@dataclass(frozen=True)
class SearchSpace:
    """What a search varies, and what it does not.

    Args:
        distributions: Optuna's, by key.
        fixed: overrides that are the same in all trials.
    """

    distributions: Mapping[str, Any]
    fixed: Sequence[str]

    def overrides(self, trial: Any) -> list[str]:
        """All overrides of a trial of Optuna."""
        return [*self.fixed, *chosen(trial.params)]


def search_space(overrides: Sequence[Override], optuna: Any) -> SearchSpace:
    """Raises: ConfigError: no override has several values, or the trials could not be compared."""
    distributions = {}
    fixed = []
    for override in overrides:
        if override.is_sweep_override():
            distributions[override.get_key_element()] = _distribution(override, optuna)
        else:
            fixed.append(str(override.input_line))
    if not distributions:
        raise ConfigError(
            "hydra/sweeper=optuna has no search space: give hparams_search=NAME, or KEY=choice(A,B)"
        )
    if "data.fold" in distributions:
        raise ConfigError(
            "hydra/sweeper=optuna: data.fold in the space would find the easiest fold; search on one fold"
        )
    return SearchSpace(distributions, fixed)


def first_config(space: SearchSpace, compose: Compose, optuna: Any) -> Composed:
    """The first random point of the space that composes.

    Raises:
        Exception: the error of the last point, if none composes.
        ConfigError: the trials have no score.
    """
    random_study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    last_error: Exception | None = None
    for _ in range(_MAX_COMPOSED):
        trial = random_study.ask(dict(space.distributions))
        try:
            composed = compose(space.overrides(trial))
        except COMPOSE_ERRORS as error:
            last_error = error
            continue
        if composed.values.data.fold == "all":
            raise ConfigError(
                "hydra/sweeper=optuna: data.fold=all leaves no cases to validate, and no score to compare"
            )
        return composed
    assert last_error is not None
    raise last_error


def chosen(params: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in params.items()]


def parsed(arguments: Sequence[str]) -> list[Override]:
    """The overrides without `hparams_search`; of each key only the last one, which counts."""
    arguments = [argument for argument in arguments if key(argument) != "hparams_search"]
    overrides = OverridesParser.create().parse_overrides(arguments)
    return list({override.get_key_element(): override for override in overrides}.values())


def _distribution(override: Override, optuna: Any) -> Any:
    """Hydra's choice, range or interval as an Optuna distribution.

    Raises:
        ConfigError: it is empty.
    """
    distributions = optuna.distributions
    values = override.value()
    try:
        if isinstance(values, IntervalSweep):
            has_integers = isinstance(values.start, int) and isinstance(values.end, int)
            kind = distributions.IntDistribution if has_integers else distributions.FloatDistribution
            return kind(values.start, values.end, log="log" in values.tags)
        if isinstance(values, RangeSweep) and not values.shuffle:
            return distributions.CategoricalDistribution(list(values.range()))
        return distributions.CategoricalDistribution(list(override.sweep_string_iterator()))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"hydra/sweeper=optuna: {override.input_line}: {error}") from error
