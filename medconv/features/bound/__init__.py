"""A lower bound of each case's Dice: `medconv bound`, and in `medconv evaluate` whether it held."""

COMMANDS = {
    "bound": ("give a lower bound of the Dice of each predicted case", "medconv.features.bound.command")
}
EVALUATIONS = ("medconv.features.bound.coverage",)
