"""medconv/data/random_streams.py: each purpose has random numbers of its own, which never change."""

import numpy as np

from medconv.data.random_streams import RandomStream, generator

NUMBERS = {
    "PATCH_POSITION": 0,
    "CASE_ORDER": 1,
    "VALUES": 2,
    "PLACE": 3,
    "ELASTIC": 4,
    "BALANCED_ORDER": 5,
    "MIXUP": 7,
    "TRANSFORMS": 8,
}  # of every run that was ever seeded


def test_streams_keep_their_numbers():
    assert {stream.name: stream.value for stream in RandomStream}.items() >= NUMBERS.items()
    for stream in RandomStream:
        expected = np.random.default_rng([3, stream.value, 12, 4]).random(5)
        assert np.array_equal(generator(3, stream, 12, 4).random(5), expected)


def test_no_two_streams_share_random_numbers():
    draws = {generator(0, stream, 1).random() for stream in RandomStream}
    assert len(draws) == len(RandomStream)
