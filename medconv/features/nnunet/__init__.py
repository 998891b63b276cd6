"""Models of nnU-Net v2 and nnssl: trained on from (`init.pretrained`), imported, and exported."""

COMMANDS = {
    "import-nnunet": ("make run folders of a trained nnU-Net v2 model", "medconv.features.nnunet.command")
}
EXPORTS = {"nnunet": "medconv.features.nnunet.export:NNUNET"}
WEIGHT_SOURCES = ("medconv.features.nnunet.pretrained:find",)
