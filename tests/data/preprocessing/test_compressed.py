"""medconv/data/preprocessing/compressed.py: a compressed store gives what a plain one gives."""

import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.stopped import stopped
from helpers.stores import assert_complete, change_a_byte_unnoticed
from helpers.tiny import train
from helpers.volumes import preprocessing_config, tiny, truncate

from medconv.data.augmentation.blocks import Blocks
from medconv.data.case import Grid
from medconv.data.loading.patch import crop, pack
from medconv.data.preprocessing.compressed import Compression
from medconv.data.preprocessing.dataset_cache import fill_store
from medconv.data.preprocessing.preprocess import CropInfo, Entry
from medconv.data.preprocessing.store import Store
from medconv.utils import checkpoint_io
from medconv.utils.signals import RunInterrupted

blosc2 = pytest.importorskip("blosc2")
CASES = ["case_0", "case_1", "case_2"]
IMAGES = {
    "volume": ((2, 70, 65, 40), None),
    "slices": ((1, 40, 130, 33), 0),
    "picture": ((3, 140, 530), None),
}


def stored(folder, kind):
    """An entry with probabilities, and what a compressed store reads of it."""
    shape, slice_axis = IMAGES[kind]
    rng = np.random.default_rng(0)
    grid = Grid(shape[1:], tuple(map(tuple, np.eye(4))))
    entry = Entry(
        rng.normal(size=shape).astype(np.float32),
        rng.integers(0, 3, shape[1:]).astype(np.uint8),
        np.zeros((5, len(shape)), np.int32),
        CropInfo(grid, shape[1:], tuple((0, length) for length in shape[1:])),
        rng.random((3, *shape[1:])).astype(np.float16),
    )
    (case,) = tiny(folder / "data", 1).cases
    store = Store(folder / "store", Compression(slice_axis))
    store.write(case, entry)
    return entry, store.read(case.id)


@pytest.mark.parametrize("kind", IMAGES)
def test_patches_and_whole_arrays_are_those_that_were_written(tmp_path, kind):
    entry, compressed = stored(tmp_path, kind)
    size = np.minimum(24, entry.label.shape)
    corner = np.subtract(entry.label.shape, 20)  # beyond the end
    blocks = Blocks(np.array([size // 4, size // 2]), np.array([size // 2, size]))
    without = replace(entry, soft_label=np.empty(0, np.float32))
    compressed_without = replace(compressed, soft_label=np.empty(0, np.float32))
    pairs = [
        (entry.image, compressed.image),
        (entry.training_label, compressed.training_label),
        (without.training_label, compressed_without.training_label),
    ]
    for plain, read_back in pairs:
        assert (read_back.shape, read_back.dtype) == (plain.shape, plain.dtype)
        assert (read_back.size, read_back.nbytes) == (plain.size, plain.nbytes)
        np.testing.assert_array_equal(np.array(read_back), plain)
        np.testing.assert_array_equal(crop(read_back, corner, size), crop(plain, corner, size))
        assert torch.equal(pack(read_back, blocks), pack(plain, blocks))


def test_the_store_of_a_dataset_is_complete_and_stands_apart(tmp_path):
    dataset = tiny(tmp_path / "data")
    plain = fill_store(dataset, preprocessing_config(), tmp_path / "cache", 1)
    store = fill_store(dataset, preprocessing_config(), tmp_path / "cache", 1, compresses=True)
    assert store.folder.name == f"{plain.folder.name}-blosc2"
    assert_complete(store, dataset)
    assert [store.digest(case) for case in CASES] == [plain.digest(case) for case in CASES]
    assert {path.name for path in store.folder.glob("case_0.*")} == {
        "case_0.json",
        "case_0.image.b2nd",
        "case_0.label.b2nd",
        "case_0.foreground.npy",
    }


@pytest.mark.parametrize("damage", [truncate, change_a_byte_unnoticed, Path.unlink])
def test_a_damaged_file_is_found_and_written_again(tmp_path, damage):
    dataset = tiny(tmp_path / "data")
    store = fill_store(dataset, preprocessing_config(), tmp_path / "cache", 1, compresses=True)
    damage(store.folder / "case_1.image.b2nd")
    with pytest.raises(ValueError, match=r"^case case_1: its prepared files .* cannot be read"):
        store.read("case_1", verify=True)
    fill_store(dataset, preprocessing_config(), tmp_path / "cache", 1, compresses=True)
    assert_complete(store, dataset)


def test_a_chunk_that_cannot_be_decompressed_names_its_file(tmp_path):
    stored(tmp_path, "volume")
    path = tmp_path / "store/case_0.image.b2nd"
    content = bytearray(path.read_bytes())
    content[len(content) // 4 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 4)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"case_0\.image\.b2nd is damaged and cannot be decompressed"):
        np.array(Store(tmp_path / "store").read("case_0").image)


def test_a_header_that_cannot_be_parsed_names_its_file(tmp_path):
    """A type that is damaged is a SyntaxError of the package."""
    stored(tmp_path, "volume")
    path = tmp_path / "store/case_0.image.b2nd"
    content = path.read_bytes()
    assert content.count(b"<f4") == 1
    path.write_bytes(content.replace(b"<f4", b"[(4"))
    with pytest.raises(ValueError, match=r"case_0\.image\.b2nd is not as it was written"):
        Store(tmp_path / "store").read("case_0")


def test_a_record_of_another_shape_is_an_error(tmp_path):
    stored(tmp_path, "volume")
    store = Store(tmp_path / "store")
    record = store._record("case_0")
    record["arrays"]["image"]["shape"] = [2, 70, 65, 41]
    store._commit("case_0", record)
    with pytest.raises(ValueError, match=r"the record does not describe case_0\.image\.b2nd"):
        store.read("case_0")


def test_a_run_resumes_from_the_other_store_to_the_same_weights(dataset, tmp_path):
    settings = [f"data.cache_dir={tmp_path / 'prepared'}"]
    train(dataset, tmp_path / "plain", *settings)
    stop = stopped(tmp_path / "stopped", number=int(signal.SIGTERM))
    with pytest.raises(RunInterrupted):
        train(dataset, tmp_path / "mixed", *settings, "data.store=blosc2", stop)
    train(dataset, tmp_path / "mixed", *settings, stop)
    plain, mixed = (
        checkpoint_io.read(tmp_path / run / "checkpoints/last.ckpt")["state_dict"]
        for run in ("plain", "mixed")
    )
    assert len(list((tmp_path / "prepared").glob("*/*-blosc2"))) == 1
    assert plain.keys() == mixed.keys()
    assert all(torch.equal(plain[name], mixed[name]) for name in plain)
