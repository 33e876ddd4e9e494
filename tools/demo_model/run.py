"""A training run in a folder, which can be stopped and resumed: model, optimizers and progress."""

from pathlib import Path
from typing import Protocol

import torch


class Plan(Protocol):
    """What a run needs to know of its hyperparameters."""

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        ...


class Run:
    """Owns the state file in `folder`."""

    def __init__(
        self, folder: Path, plan: Plan, model: torch.nn.Module, optimizers: tuple[torch.optim.Optimizer, ...]
    ) -> None:
        self.folder, self._plan, self._model, self._optimizers = folder, plan, model, optimizers
        self.step, self.core_seconds = 0, 0.0

    @property
    def state_path(self) -> Path:
        """The state file."""
        return self.folder / "state.pt"

    def save_state(self) -> None:
        """Save everything needed to resume; atomically, so that a partial file never replaces a complete one."""
        state = {
            "model": self._model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "step": self.step,
            "core_seconds": self.core_seconds,
        }
        partial = self.state_path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.state_path)

    def load_state(self) -> None:
        """Resume from the state file if there is one."""
        if self.state_path.exists():
            state = torch.load(self.state_path, weights_only=True)
            self._model.load_state_dict(state["model"])
            for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step, self.core_seconds = state["step"], state["core_seconds"]

    def learn(self, loss: torch.Tensor) -> None:
        """Update the weights by a loss, with this step's learning rate; on to the next step."""
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no type for it
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._plan.rate(self.step)
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
