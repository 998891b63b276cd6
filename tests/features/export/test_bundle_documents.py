"""medconv/features/export/bundle_documents.py: shapes in the metadata; `test_monai_bundle` checks it by MONAI's schema."""

from medconv.features.export import bundle_documents


def test_an_open_size_is_an_expression_and_a_fixed_one_a_number():
    metadata = {
        "inputs": {"divisor": [4, 8], "dynamic": {"spatial": [True, False]}},
        "windows": {"patch_size": [16, 12]},
    }
    assert bundle_documents._spatial_shape(metadata) == ["4 * n", 12]


def test_channels_are_numbered():
    image = bundle_documents._data_format("magnitude", ["4 * n", 12], ["T1", "FLAIR"])
    assert image["num_channels"] == 2 and image["channel_def"] == {0: "T1", 1: "FLAIR"}
    assert image["spatial_shape"] == ["4 * n", 12]
