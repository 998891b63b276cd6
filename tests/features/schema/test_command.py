"""`medconv schema` prints JSON that editors read."""

import json

import pytest

from medconv.cli.main import run


def test_the_schema_is_printed(capsys):
    assert run(["schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["$schema"].startswith("http://json-schema.org/") and "data" in printed["properties"]


def test_it_takes_no_arguments():
    with pytest.raises(ValueError, match="unrecognized arguments: data=msd"):
        run(["schema", "data=msd"])
