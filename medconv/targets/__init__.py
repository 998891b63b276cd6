"""What a network predicts: label maps and regions; other kinds are features."""

from medconv.targets.base import Targets, all_kinds

__all__ = ["Targets", "all_kinds"]
