"""What networks must share, so that a mean over their predictions means something."""

from __future__ import annotations

from medconv.inference.load import LoadedModel


def check_same(first: LoadedModel, second: LoadedModel) -> None:
    """Raises: ValueError: no mean can be taken over the two."""
    values_of_first = _comparable(first)
    for name, value in _comparable(second).items():
        if value != values_of_first[name]:
            raise ValueError(
                f"{second.path}: cannot be averaged with {first.path}, its {name} differ: "
                f"{value}; there {values_of_first[name]}"
            )


def _comparable(model: LoadedModel) -> dict[str, str]:
    """What must be the same for a mean, by name, in words."""
    return {
        "targets": model.targets.description,
        "classes": ", ".join(model.class_names),
        "channels": f"{len(model.modalities)}: {', '.join(model.modalities)}",
        "images": f"{model.preprocessing.image_dims}D",
        "source_spacing_mm": str(model.source_spacing_mm),
    }
