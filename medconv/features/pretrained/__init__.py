"""Pretrained weights: `init.pretrained` names a file of ours or of others, or one on the Hugging Face Hub."""

WEIGHT_SOURCES = ("medconv.features.pretrained.source:find",)
