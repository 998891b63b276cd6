"""Fits the configured loss to the targets."""

from __future__ import annotations

from typing import Any

from torch import nn

from medconv.models.build import Values
from medconv.targets.image_level import outcome_of
from medconv.targets.segmentation import Targets
from medconv.training.losses.image_level import ForOutcome
from medconv.training.losses.segmentation import Targeted


def fitted_loss(loss: Any, facts: Values) -> nn.Module:
    """A loss made to fit what the network is asked for. Raises: ValueError: it cannot be."""
    outcome = outcome_of(facts)
    if outcome is None:
        return Targeted(loss, Targets.from_plain(facts["targets"]), facts["spatial_dims"])
    return ForOutcome(loss, outcome, facts.get("value_means"), facts.get("value_stds"))
