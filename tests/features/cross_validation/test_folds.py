"""medconv/features/cross_validation/folds.py: configs that cannot be used."""

import json

import pytest

from medconv.features.cross_validation.folds import read_folds
from medconv.training import identity


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xff\xfe", "not a readable config"),
        (b"data: {", "not a readable config"),
        (
            b"data: {fold: 0, splits_file: null, num_folds: null}",
            "data.num_folds must be a number of folds, got None",
        ),
        (b"data: {fold: 0, num_folds: 100000}", "data.num_folds must be a number of folds, got 100000"),
        (
            b"data: {fold: /../../precious, num_folds: 5}",
            "data.fold must be `all` or a number, got '/../../precious'",
        ),
        (b"data: {fold: '1*', num_folds: 5}", "data.fold must be `all` or a number, got '1*'"),
    ],
)
def test_an_unusable_config_is_an_error_with_its_path(content, expected, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_bytes(content)
    with pytest.raises(ValueError) as error:
        list(read_folds(tmp_path))
    assert str(error.value).startswith(f"{tmp_path}/run/config.yaml: ") and expected in str(error.value)


def test_folds_of_changed_cases_differ(tmp_path):
    digests = {"a": 1, "b": 2, "c": 3}
    for number, changed in (("0", {}), ("1", {"b": 7}), ("2", {})):
        folder = tmp_path / number
        folder.mkdir()
        (folder / "config.yaml").write_text(f"data: {{fold: {number}, num_folds: 3}}")
        content = {**digests, **changed}
        val = {"abc"[int(number)]: content.pop("abc"[int(number)])}
        (folder / identity.CASES_FILE).write_text(json.dumps({"train": content, "val": val}))
    first, second, third = read_folds(tmp_path)
    assert first.differences(second) == ["other image, label or values: b"]
    assert first.differences(third) == []
    (tmp_path / "2" / identity.CASES_FILE).unlink()  # as of earlier versions
    assert list(read_folds(tmp_path))[2].differences(second) == []
