"""medconv/features/diagnosis/command.py: its own options, and keys that are left for Hydra."""

from medconv.features.diagnosis import command


def test_keys_are_left_for_hydra():
    arguments = ["mine.MyConv", "model=segresnet", "data.patch_size=[8,8]", "--pairs", "3"]
    options = command.parser().parse_args(arguments)
    assert (options.conv, options.pairs, options.compile) == ("mine.MyConv", 3, False)
    assert options.overrides == ["model=segresnet", "data.patch_size=[8,8]"]
