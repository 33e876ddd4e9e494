"""Pipeline stages: how a model's layers are divided among them, and how tensors are sent from one to the next."""

from functools import cache
from itertools import accumulate

import torch

from octavo.config.model import ModelConfig
from octavo.config.parallel import Stage
from octavo.distributed.groups import Group
from octavo.errors import StepError
from octavo.models.interfaces import IntermediateTensors
from octavo.worker.memory import empty_model, num_weights


def plan_stages(model: ModelConfig, num_stages: int) -> list[Stage]:
    """Divide the layers, at least one per stage, so that the largest stage has as few weights as possible.

    The embedding counts for the first stage and the logits head for the last. If tied, both hold the table.
    """
    assert 1 <= num_stages <= model.num_layers, f"{num_stages} stages for {model.num_layers} layers"
    if num_stages == 1:
        return [Stage.whole(model.num_layers)]
    built = empty_model(model)
    layers = [num_weights(built.get_submodule(f"layers.{layer}")) for layer in range(model.num_layers)]
    before, vocabulary = [0, *accumulate(layers)], num_weights(built.get_submodule("embedding"))

    @cache
    def best(first: int, num_left: int) -> tuple[int, tuple[int, ...]]:
        """Return the weights of the largest of `num_left` stages from layer `first` on, and where each one ends."""
        start = before[first] - vocabulary * (first == 0)
        if num_left == 1:
            return before[-1] + vocabulary - start, (model.num_layers,)
        plans = []
        for end in range(first + 1, model.num_layers - num_left + 2):
            largest, ends = best(end, num_left - 1)
            plans.append((max(before[end] - start, largest), (end, *ends)))
        return min(plans)

    ends = best(0, num_stages)[1]
    return [
        Stage(first_layer=first, end_layer=end, is_first=first == 0, is_last=end == model.num_layers)
        for first, end in zip((0, *ends), ends, strict=False)
    ]


class StageLinks:
    """A rank's links to the previous and the next stage in `stages`.

    A message is [2 T + 1, D]: hidden, residual, and a row that says whether they are valid. A failed stage sends its
    error message instead, so that the next one does not hang and the last stage can report the error.
    """

    def __init__(self, stages: Group, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._stages, self._hidden_size, self._dtype, self._device = stages, hidden_size, dtype, device

    def receive(self, num_tokens: int) -> IntermediateTensors | None:
        """Wait for the tensors of a step of T tokens; None on the first stage, which receives none.

        Raises StepError: an earlier stage failed; carries its message.
        """
        if self._stages.rank == 0:
            return None
        shape = 2 * num_tokens + 1, self._hidden_size
        message = self._stages.receive(shape, self._dtype, self._stages.rank - 1)
        if message[-1, 0] != 0:
            letters = bytes(message[:-1].cpu().contiguous().view(torch.uint8).view(-1).tolist())
            raise StepError(letters.rstrip(b"\0").decode(errors="replace"))  # as much as fitted
        return IntermediateTensors(message[:num_tokens], message[num_tokens:-1])

    def send(self, tensors: IntermediateTensors) -> None:
        """Send the tensors of a step to the next stage."""
        good = tensors.hidden.new_zeros(1, self._hidden_size)
        self._stages.send(torch.cat((tensors.hidden, tensors.residual, good)), self._stages.rank + 1)

    def send_failure(self, num_tokens: int, error: Exception) -> None:
        """Tell the next stage that this stage, or an earlier one, failed and has no tensors."""
        is_told = isinstance(error, StepError)
        words = str(error) if is_told else f"stage {self._stages.rank}: {type(error).__name__}: {error}"
        message = torch.zeros(2 * num_tokens + 1, self._hidden_size, dtype=self._dtype)
        message[-1] = 1
        text = message[:-1].view(torch.uint8).view(-1)
        letters = torch.frombuffer(bytearray(words.encode()), dtype=torch.uint8)[: len(text)]
        text[: len(letters)] = letters
        self._stages.send(message.to(self._device), self._stages.rank + 1)
