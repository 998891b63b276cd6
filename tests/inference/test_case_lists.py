"""medconv/inference/inputs.py: what lists must hold."""

import json

import pytest

from medconv.inference.inputs import find_cases


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "a.json: not JSON"),
        ("a.json", "3", "a.json: expected an array of cases, or an object of case id to files"),
        ("a.json", "[[]]", "a case is a path, or an array of paths, one per channel; got []"),
        ("a.json", '{"a": 3}', "a case is a path, or an array of paths, one per channel; got 3"),
        ("a.json", '{"../a": "x.nii"}', "a case id names a file, of at most 200 bytes, and cannot be '../a'"),
        ("a.json", '{"": "x.nii"}', "and cannot be ''"),
        ("a.json", '["/"]', "and cannot be ''"),
        ("a.json", r'{"a\u0000": "x.nii"}', r"and cannot be 'a\x00'"),
        ("a.json", r'{"\ud800": "x.nii"}', r"and cannot be '\ud800'"),
        ("a.json", json.dumps({"é" * 150: "x.nii"}), "and cannot be 'éé"),
        ("a.json", '{"a": "x.nii", "a": "y.nii"}', "a.json: two cases are called a"),
        ("a.json", '["x/a.nii", "y/a.nii"]', "two cases are called a; a JSON object gives them ids"),
        ("a.txt", "# nothing\n", "a.txt: no cases found"),
    ],
)
def test_bad_lists_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError) as error:
        find_cases(tmp_path / name, 1)
    assert message in str(error.value)
