"""Names of the precisions that Lightning and torch know; without torch, for the schema of the config."""

# of `Trainer(precision=...)`, and medconv's `auto`
PRECISIONS = (
    "auto",
    "bf16-mixed",
    "16-mixed",
    "32-true",
    "64-true",
    "bf16-true",
    "16-true",
    "transformer-engine",
    "transformer-engine-float16",
    "64",
    "32",
    "16",
    "bf16",
)
# of `torch.set_float32_matmul_precision`
MATMUL_PRECISIONS = ("highest", "high", "medium")
