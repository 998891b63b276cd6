"""scripts/gpu_checks/failures.py: an error comes with the tensors of where it began, and a training's sizes."""

import pytest
import torch

from gpu_checks.failures import described, failure, sizes


def test_the_tensors_are_those_of_the_first_error():
    def product():
        image, weight = torch.zeros(2, 3), torch.zeros(5)
        try:
            print(image @ weight)
        except RuntimeError as error:
            raise ValueError("bad settings") from error

    with pytest.raises(ValueError, match="bad settings") as caught:
        product()
    text = failure(caught.value)
    assert "RuntimeError" in text and "ValueError: bad settings" in text
    assert text.endswith("in product: image: 2x3 float32 cpu; weight: 5 float32 cpu")


def test_a_training_has_sizes_as_soon_as_it_has_a_configuration(tmp_path):
    assert sizes(tmp_path) == ""
    (tmp_path / "config.yaml").write_text("data: {patch_size: [8, 8, 8], batch_size: 2}\n")
    assert sizes(tmp_path).startswith("data.patch_size=[8, 8, 8]; data.batch_size=2; data.spacing_mm=None")


@pytest.mark.parametrize("tensor", [torch.tensor(1.0), torch.zeros(2, 3)])
def test_tensors_are_described(tensor):
    assert described(tensor) in ("scalar float32 cpu", "2x3 float32 cpu")
