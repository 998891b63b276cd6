"""Cross-entropy and Dice of labels that are probabilities, such as the mean of several raters."""

from torch import Tensor

from medconv.training.losses.segmentation import DiceCrossEntropy, counted


class SoftDiceCrossEntropy(DiceCrossEntropy):
    """Cross-entropy plus a Dice that is best where the prediction equals the probabilities of the label.

    The usual soft Dice is not: it falls until every voxel is 0 or 1. Here, the intersection of probabilities
    p and q is (p + q - |p - q|) / 2. Where labels are 0 and 1, it is that of `DiceCrossEntropy`.

    Shape:
        logits and reference (batch, classes, *spatial), the reference's sum over classes is 1;
        labelled (batch, 1, *spatial) bool -> scalar, computed in fp32.
    Args: as of `DiceCrossEntropy`.
    Source: Wang et al. 2023, arXiv:2303.16296, Dice semimetric loss 1.
    """

    kinds = ("soft",)

    def sums(
        self, logits: Tensor, reference: Tensor, labelled: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        log_probability = logits.log_softmax(1)
        probability = log_probability.exp()
        entropy = -log_probability * reference
        entropy, probability, reference = counted(entropy, probability, reference, labelled, weights)
        axes = [0, *range(2, logits.ndim)]
        # The background has no Dice
        total = (probability + reference)[:, 1:]
        difference = (probability - reference)[:, 1:].abs()
        sizes = total.sum(axes)
        # The smaller of p and q is (p + q - |p - q|) / 2
        return entropy.sum(), (sizes - difference.sum(axes)) / 2, sizes
