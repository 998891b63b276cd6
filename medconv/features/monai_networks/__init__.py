"""Networks of MONAI that need a change: DenseNet, EfficientNet, SE-ResNet, UNet++ and V-Net."""
