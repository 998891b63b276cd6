"""scripts/gpu_checks/failures.py: an error comes with the tensors of where it began, and a training's sizes."""

import pytest
import torch

from gpu_checks.failures import failure


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
