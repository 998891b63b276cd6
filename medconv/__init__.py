"""medconv: training of medical-image CNNs with anatomy-aware convolutions."""

__version__ = "0.1.0"
