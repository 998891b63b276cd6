"""Ensembles: networks of one config with other seeds or folds, trained by one command and used as one."""

COMMANDS = {
    "ensemble": ("train several networks of one config, used as one", "medconv.features.ensemble.command")
}
