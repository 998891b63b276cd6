"""medconv/features/sweeps/search_space.py: ranges of Hydra as distributions of Optuna."""

import pytest

from medconv.features.sweeps import search_space

optuna = pytest.importorskip("optuna")


@pytest.mark.parametrize(
    ("text", "kind", "values"),
    [
        ("x=choice(a,b)", "CategoricalDistribution", {"choices": ("a", "b")}),
        ("x=a,b", "CategoricalDistribution", {"choices": ("a", "b")}),
        ("x=choice([4,8],[8])", "CategoricalDistribution", {"choices": ("[4,8]", "[8]")}),
        ("x=range(1,9,3)", "CategoricalDistribution", {"choices": (1, 4, 7)}),
        ("x=interval(0.2,0.8)", "FloatDistribution", {"low": 0.2, "high": 0.8, "log": False}),
        ("x=int(interval(1,8))", "IntDistribution", {"low": 1, "high": 8, "log": False}),
        ("x=tag(log,interval(1e-4,1e-2))", "FloatDistribution", {"low": 1e-4, "high": 1e-2, "log": True}),
    ],
)
def test_hydras_ranges_become_distributions_of_optuna(text, kind, values):
    (override,) = search_space.parsed(["x=1", text, "hparams_search=mine"])
    distribution = search_space._distribution(override, optuna)
    assert type(distribution).__name__ == kind
    assert {name: getattr(distribution, name) for name in values} == values


def test_the_last_override_of_a_key_counts():
    overrides = search_space.parsed(["a=choice(1,2)", "b=3", "a=4"])
    assert sorted(o.input_line for o in overrides) == ["a=4", "b=3"]
