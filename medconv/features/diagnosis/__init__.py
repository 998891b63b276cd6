"""What limits a run's speed, what its convolution costs, and where its first NaN came from."""

COMMANDS = {
    "bench-conv": (
        "time a convolution of yours against nn.Conv, and show what helps",
        "medconv.features.diagnosis.command",
    )
}
REMARKS = ("medconv.features.diagnosis.remarks",)
