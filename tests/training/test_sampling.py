"""medconv/training/data_setup.py: the sampler that `sampler` or keys of `data` choose, and what the log says."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from helpers import tiny
from helpers.loading import cases_of, training_cases
from helpers.volumes import tiny as tiny_volumes

from medconv import config
from medconv.config import ConfigError, RunConfig
from medconv.data.loading.samplers import BalancedPatchSampler, ForegroundSampler, Sampler
from medconv.features.image_level.samples import BalancedImageSampler
from medconv.training import data_setup

ALIKE = cases_of(("a", "b", "c"))
WEIGHTED = cases_of(("a", "b", "c"), [1, 1, 4])
PATCHES = training_cases(ALIKE, (2, 2), class_indices=[[0], [1, 2]])
IMAGES = training_cases(ALIKE, class_indices=[[0], [1, 2]])


class FirstCase(Sampler):
    """A sampler of a user's own."""

    def case_index(self, seed: int, sample: int) -> int:
        return 0


class NoSampler:
    def __init__(self, cases: Any) -> None:
        pass


@cache
def composed(*overrides: str) -> RunConfig:
    """With the interpolations of `sampler` replaced, as `resolve` does."""
    values = tiny.composed(*overrides, "data=msd", "data.root=.")
    checked = config.validate(values)
    sampler = values.sampler
    return replace(checked, sampler={str(key): sampler[key] for key in sampler})


def built(*overrides, cases=PATCHES):
    settings = composed(*overrides)
    return data_setup.build_sampler(settings.sampler, settings.data, cases)


def draws(sampler):
    return [sampler.case_index(0, n) for n in range(40)]


@pytest.mark.parametrize(
    ("overrides", "kind", "share"),
    [
        ([], ForegroundSampler, 0.33),
        (["data.oversample_foreground=0.5"], ForegroundSampler, 0.5),
        (["data.balanced_sampling=true"], BalancedPatchSampler, 0.33),
        (["sampler=foreground"], ForegroundSampler, 0.33),
        (["sampler=foreground", "data.oversample_foreground=0.5"], ForegroundSampler, 0.5),
        (["sampler=foreground", "sampler.foreground_share=0.2"], ForegroundSampler, 0.2),
        (["sampler=balanced", "data.oversample_foreground=1"], BalancedPatchSampler, 1),
        (["sampler=balanced", "data.balanced_sampling=true"], BalancedPatchSampler, 0.33),
        (["sampler=uniform"], ForegroundSampler, 0),
        ([f"sampler._target_={__name__}.FirstCase"], FirstCase, 0),
    ],
)
def test_options_and_keys_choose_the_sampler(overrides, kind, share):
    sampler = built(*overrides)
    assert type(sampler) is kind and sampler.foreground_share == share


def test_options_and_keys_for_the_same_draw_the_same():
    weighted = training_cases(WEIGHTED, (2, 2), class_indices=[[0], [1, 2]])
    for cases in (PATCHES, weighted):
        assert draws(built("sampler=foreground", cases=cases)) == draws(built(cases=cases))
        by_key = built("data.balanced_sampling=true", cases=cases)
        assert draws(built("sampler=balanced", cases=cases)) == draws(by_key)
    assert draws(built("sampler=weighted", cases=weighted)) == draws(built(cases=weighted))
    assert draws(built("sampler=uniform")) == draws(built())


def test_whole_images_have_samplers_too(caplog):
    caplog.set_level("INFO")
    assert type(built("sampler=balanced", cases=IMAGES)) is BalancedImageSampler
    assert type(built("data.balanced_sampling=true", cases=IMAGES)) is BalancedImageSampler
    assert draws(built("sampler=uniform", cases=IMAGES)) == draws(built(cases=IMAGES))
    assert not caplog.text
    built("data.oversample_foreground=0.7", cases=IMAGES)
    assert "data.oversample_foreground has no effect" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "cases", "message"),
    [
        (["data.oversample_foreground=2"], ALIKE, r"data\.oversample_foreground must be .* 1, got 2"),
        (["data.oversample_foreground=-0.1"], ALIKE, r"data\.oversample_foreground must be .*got -0\.1"),
        (["data.oversample_foreground=nan"], ALIKE, r"data\.oversample_foreground must be .* 1, got nan"),
        (["sampler=foreground", "sampler.foreground_share=2"], ALIKE, "^sampler: foreground_share must lie"),
        (
            ["sampler=foreground", "data.balanced_sampling=true"],
            ALIKE,
            "balanced_sampling=true has no effect",
        ),
        (["sampler=uniform", "data.oversample_foreground=0.5"], ALIKE, "foreground=0.5 has no effect with"),
        (
            [f"sampler._target_={__name__}.FirstCase", "data.oversample_foreground=0.5"],
            ALIKE,
            r"has no effect with sampler\._target_=\S+FirstCase, whose foreground_share is 0; set only one",
        ),
        (["sampler=weighted"], ALIKE, "^sampler: by_weight=true needs case weights that differ"),
        (["sampler=uniform"], WEIGHTED, "^sampler: by_weight=false draws each case equally often"),
        ([f"sampler._target_={__name__}.NoSampler"], ALIKE, r"NoSampler must make a medconv\S+\.Sampler"),
        ([f"sampler._target_={__name__}.FirstCase", "+sampler.x=1"], ALIKE, "sampler: .* cannot be built"),
    ],
)
def test_what_contradicts_itself_is_an_error(overrides, cases, message):
    with pytest.raises(ConfigError, match=message):
        built(*overrides, cases=training_cases(cases, (2, 2)))


def test_differences_between_cases_are_logged(tmp_path, caplog):
    caplog.set_level("INFO")
    dataset = tiny_volumes(tmp_path)
    data_setup.log_annotated_and_weights(dataset.cases, dataset)
    assert not caplog.text
    first, *others = dataset.cases
    data_setup.log_annotated_and_weights([replace(first, annotated=(2,), weight=2.5), *others], dataset)
    assert "training cases that annotate a class, of 3: big in 2, small in 3" in caplog.text
    assert "training cases are drawn by weight: 1 of 2, 2.5 of 1" in caplog.text
