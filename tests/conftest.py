"""Fixtures of all tests: datasets and trained runs that several files share, and the folder of real images.
That this file is here also puts `tests/` on the import path. Fixtures import what they need: the process that only
hands out tests loads no torch.
"""

import gc
import logging
import os
import resource
import shutil
import tempfile
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests fork processes, which hang on OpenMP's threads

import pytest

from medconv import doors

# Tests crash processes, each of which would write gigabytes
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

TRAINED = {"dataset", "exported", "poisoned", "sweep"}


def pytest_collection_modifyitems(items):
    """Files of whole runs begin first, so that at the end no process waits for another one's long file. What has
    one of the fixtures TRAINED trains.
    """
    for item in items:
        if TRAINED & {*getattr(item, "fixturenames", ())}:
            item.add_marker("run")
    long = ("integration", "benchmarks", "features", "training")
    items.sort(key=lambda item: not {*item.path.parts} & {*long})


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """The garbage collector does not look through the libraries and all tests again and again, neither here nor
    while they run.
    """
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.fixture(autouse=True)
def logging_as_it_was():
    """A command that a test runs in this process sets logging up for good; the next test would write into
    its closed files.
    """
    loggers = [logging.getLogger(name) for name in ("", "medconv", "lightning.pytorch", "lightning.fabric")]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture(autouse=True)
def named_packages_as_they_were():
    """A package that a test names by `--package` or `trusted` is asked for what it brings ever after, in the
    next test without its folder.
    """
    before = doors.named_packages[:]
    yield
    if doors.named_packages != before:
        doors.named_packages[:] = before
        doors.features.cache_clear()


@pytest.fixture
def open_folder():
    """A folder that everybody may enter, unlike pytest's own: for what a process without root's rights
    does.
    """
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    from helpers import tiny

    return tiny.write_dataset(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """A trained network and its exported files, made once by whichever process of the tests needs them
    first.
    """
    from helpers import exports

    return exports.shared(_shared_folder(tmp_path_factory) / "exported")


@pytest.fixture(scope="session")
def sweep(tmp_path_factory):
    """A cross-validation of three folds, trained once by whichever process of the tests needs it first."""
    from helpers import cross_validations

    return cross_validations.shared(_shared_folder(tmp_path_factory) / "swept")


@pytest.fixture
def sweep_folder(sweep, tmp_path):
    """A copy of its folder that a test may change."""
    return Path(shutil.copytree(sweep.folder, tmp_path / "runs/cv"))


def _shared_folder(tmp_path_factory):
    """The same folder in every process of the tests."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture
def launched(monkeypatch):
    """Sets the variables of a launcher, as keyword arguments."""
    from helpers import launchers

    return partial(launchers.launch, monkeypatch)


@pytest.fixture(scope="session")
def realdata():
    """The folder that MEDCONV_REALDATA names, else `../shared/data` beside the repository; skips where it
    is absent.
    """
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("MEDCONV_REALDATA") or beside)
    if not folder.is_dir():
        pytest.skip(f"no real images: {folder} is absent; MEDCONV_REALDATA may name their folder")
    return folder
