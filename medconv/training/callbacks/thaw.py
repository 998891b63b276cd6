"""`init.thaw_at`: parameters that are frozen at first, and train later."""

import logging
from collections.abc import Sequence
from typing import Any

from lightning import Callback, Trainer
from lightning.pytorch.strategies import ParallelStrategy

from medconv.models.freeze import FrozenPart, description, frozen_part

_ROUNDING = 1e-9  # progress is a sum over steps
log = logging.getLogger(__name__)


class Thaw(Callback):
    """Keeps parameters as they are until a share of the run is done; then all train, after a warm-up.

    The optimizer has all parameters from the start, but those that are frozen have no gradient, so it leaves
    them alone. Batch norms of which all parameters are frozen keep their statistics until then.

    Args:
        patterns: regular expressions on the names of parameters of the module's `network`.
        at: share of the run, 0 to 1.
    """

    def __init__(self, patterns: Sequence[str], at: float) -> None:
        self.patterns = patterns
        self.at = at
        self.thawed_step: int | None = None  # the first step that trains all parameters
        self._frozen = FrozenPart({}, ())

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        # Here, since strategies replace parameters
        frozen = frozen_part(pl_module.network, self.patterns)
        # What the network itself keeps frozen stays so
        parameters = {name: each for name, each in frozen.parameters.items() if each.requires_grad}
        ours = {id(each) for each in parameters.values()}
        norms = [
            norm
            for norm in frozen.norms
            if ours.intersection(map(id, norm.parameters())) or not [*norm.parameters()]
        ]
        self._frozen = FrozenPart(parameters, tuple(norms))

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        schedule = pl_module.lr_schedulers()
        if self.thawed_step is None and schedule.progress >= self.at - _ROUNDING:
            self.thawed_step = trainer.global_step
            schedule.warm_up_again()
            log.info(
                "init.thaw_at=%g: from step %d on, %s train too; the learning rate warms up again",
                self.at,
                1 + trainer.global_step,
                description(self._frozen, pl_module.network),
            )
        is_thawed = self.thawed_step is not None
        for norm in self._frozen.norms:
            norm.train(is_thawed)
        if not isinstance(trainer.strategy, ParallelStrategy):
            # Saves their backward pass. DDP, also of one process, waits for all gradients.
            for parameter in self._frozen.parameters.values():
                parameter.requires_grad_(is_thawed)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        if self.thawed_step is None:
            for parameter in self._frozen.parameters.values():
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"thawed_step": self.thawed_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.thawed_step = state_dict["thawed_step"]
