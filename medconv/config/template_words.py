"""Keys and options of lightning-hydra-template, which many know, and what does the same here."""

_KEYS = {
    "task_name": "run.name=NAME names the run's folder",
    "extras.print_config": "--cfg job prints the config, and each run writes config.yaml",
    "extras.ignore_warnings": "PYTHONWARNINGS=ignore before the command hides warnings",
    "extras.enforce_tags": "tags=[...] sets tags; nothing asks for them",
    "extras": "--cfg job prints the config; tags=[...] sets tags",
    "paths": "data.root is the dataset's folder, run.dir the run's",
    "train": "medconv train always trains; test=true also scores the test cases",
    "optimized_metric": "hydra/sweeper=optuna follows the metric of the task (docs/sweeps.md)",
}
_OPTIONS = {
    "logger=many_loggers": (
        "logger=wandb and logger=mlflow write TensorBoard, too, and every run writes metrics.csv; "
        "+logger.NAME._target_=CLASS adds one"
    ),
    "logger=comet": "Offline, it writes no file",
    "logger=neptune": "Lightning has none any more",
    "logger=aim": "It needs pkg_resources, which setuptools has no more",
    "callbacks=early_stopping": "early_stopping=patience stops early",
    "callbacks=model_checkpoint": "every run writes best.ckpt and last.ckpt; run.checkpoint_interval",
    "debug=fdr": "debug=default is the shortest run; trainer.fast_dev_run=true is Lightning's",
}


def same_here(word: str) -> str | None:
    """What does the same here, as a sentence; None: the template has no such key or option.

    Args: word: a key such as `extras.print_config`, or an option such as `logger=many_loggers`.
    """
    group = word.partition(".")[0]
    return _OPTIONS.get(word) or _KEYS.get(word) or _KEYS.get(group)
