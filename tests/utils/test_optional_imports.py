"""medconv/utils/optional_imports.py: a package of an extra is imported, or an error says how to install it."""

import json
import sys
from pathlib import Path

import pytest

from medconv.utils.optional_imports import needed


def test_an_installed_package_is_imported():
    assert needed("json", "nrrd", "reading NRRD", Path("a.nrrd")) is json


def test_a_missing_package_is_an_error_that_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "nrrd", None)
    with pytest.raises(ValueError) as error:
        needed("nrrd", "nrrd", "reading NRRD", Path("a.nrrd"))
    assert str(error.value) == "a.nrrd: reading NRRD needs the package nrrd: pip install 'medconv[nrrd]'"
    assert isinstance(error.value.__cause__, ImportError)
