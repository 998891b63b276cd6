"""medconv/utils/checkpoint_io.py: damaged files and files with objects are refused; nothing is unpickled."""

import errno
import os
import pickle
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import medconv
from medconv.utils import checkpoint_io


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("version", "warns"),
    [("99.0", True), ("0.1.7", False), (medconv.__version__, False), (3, False), ("of tomorrow", False)],
)
def test_a_later_version_is_named_with_this_one(version, warns, tmp_path, caplog):
    torch.save({"medconv": {"version": version}, "state_dict": {}}, tmp_path / "x.ckpt")
    checkpoint_io.read(tmp_path / "x.ckpt")
    assert (f"written by medconv {version}, this is {medconv.__version__}" in caplog.text) == warns


@pytest.fixture
def checkpoint(tmp_path):
    network = {f"network.{name}": value for name, value in nn.Linear(3, 2).state_dict().items()}
    torch.save({"medconv": {"config": {}}, "state_dict": network}, tmp_path / "good.ckpt")
    return tmp_path / "good.ckpt"


def test_weights_are_loaded_into_a_matching_network(checkpoint):
    content, layer = checkpoint_io.read(checkpoint), nn.Linear(3, 2)
    checkpoint_io.load_weights(layer, content, checkpoint)
    assert torch.equal(layer.weight, content["state_dict"]["network.weight"])
    with pytest.raises(ValueError, match=r"good\.ckpt: its weights do not fit this network: size mismatch"):
        checkpoint_io.load_weights(nn.Linear(4, 2), content, checkpoint)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"not a checkpoint at all", "no checkpoint|damaged"),
        (b"", "damaged|no checkpoint"),
        (b"\x80\x02.", "damaged"),
    ],
)
def test_damaged_files_are_refused(content, expected, tmp_path):
    path = tmp_path / "x.ckpt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"x\.ckpt: .*({expected})"):
        checkpoint_io.read(path)


def test_a_payload_is_never_unpickled(tmp_path):
    torch.save({"medconv": Payload(tmp_path / "hit"), "state_dict": {}}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="refused"):
        checkpoint_io.read(tmp_path / "x.ckpt")
    (tmp_path / "y.ckpt").write_bytes(pickle.dumps(Payload(tmp_path / "hit")))
    with pytest.raises(ValueError, match="refused|damaged"):
        checkpoint_io.read(tmp_path / "y.ckpt")
    assert not (tmp_path / "hit").exists()


def test_a_compressed_archive_is_refused_before_it_is_read(checkpoint, tmp_path):
    """A few kilobytes can stand for gigabytes of zeros."""
    with (
        zipfile.ZipFile(checkpoint) as plain,
        zipfile.ZipFile(tmp_path / "x.ckpt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
        packed.writestr("good/data/9", bytes(10_000_000))
    with pytest.raises(ValueError, match=r"x\.ckpt: refused, 0\.0 GB are packed in it"):
        checkpoint_io.read(tmp_path / "x.ckpt")


def test_a_flipped_bit_is_an_error(checkpoint, tmp_path):
    content = bytearray(checkpoint.read_bytes())
    weights = next(iter(torch.load(checkpoint, weights_only=True)["state_dict"].values()))
    content[content.index(weights.numpy().tobytes())] ^= 1
    (tmp_path / "x.ckpt").write_bytes(content)
    torch.load(tmp_path / "x.ckpt", weights_only=True)  # torch does not check
    with pytest.raises(ValueError, match=r"x\.ckpt: damaged, \S+/data/\d+ in it does not match its checksum"):
        checkpoint_io.read(tmp_path / "x.ckpt")


def test_a_checkpoint_of_another_program_is_refused(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="not a medconv checkpoint"):
        checkpoint_io.read(tmp_path / "x.ckpt")


def test_a_file_that_cannot_be_read_is_not_called_damaged(checkpoint):
    """Else a run would resume from an earlier one, and put this one aside. Here no more files can be open."""
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        try:
            checkpoint_io.read(checkpoint)
        except OSError as error:
            os._exit(error.errno if error.filename == str(checkpoint) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == errno.EMFILE
