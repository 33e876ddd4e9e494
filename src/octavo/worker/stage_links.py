"""What one stage of a pipeline hands to the next: one message per step, whose size both know from the order.

Legend: T = tokens of the step, D = hidden size.
"""

import torch

from octavo.distributed.groups import Group
from octavo.errors import StepError
from octavo.models.interfaces import IntermediateTensors


class StageLinks:
    """A rank's two ends of the pipeline: the stage before it, and the one behind it, in `stages`.

    A message is [2 T + 1, D]: hidden, residual, and a row that says whether they are good. A stage that fails sends its
    error's words in their place, so nobody waits for it in vain and the last stage can tell what happened.
    """

    def __init__(self, stages: Group, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._stages, self._hidden_size, self._dtype, self._device = stages, hidden_size, dtype, device

    def receive(self, num_tokens: int) -> IntermediateTensors | None:
        """Wait for the tensors of a step of T tokens; None on the first stage, which gets none.

        Raises:
            StepError: a stage before this one failed, in its own words.
        """
        if self._stages.rank == 0:
            return None
        shape = 2 * num_tokens + 1, self._hidden_size
        message = self._stages.receive(shape, self._dtype, self._stages.rank - 1)
        if message[-1, 0] != 0:
            raise StepError(_words(message))
        return IntermediateTensors(message[:num_tokens], message[num_tokens:-1])

    def send(self, tensors: IntermediateTensors) -> None:
        """Hand the tensors of a step on."""
        good = tensors.hidden.new_zeros(1, self._hidden_size)
        self._stages.send(torch.cat((tensors.hidden, tensors.residual, good)), self._stages.rank + 1)

    def send_failure(self, num_tokens: int, error: Exception) -> None:
        """Hand on that this stage, or one before it, has no tensors for a step."""
        is_told = isinstance(error, StepError)
        words = str(error) if is_told else f"stage {self._stages.rank}: {type(error).__name__}: {error}"
        message = torch.zeros(2 * num_tokens + 1, self._hidden_size, dtype=self._dtype)
        message[-1] = 1
        text = message[:-1].view(torch.uint8).view(-1)
        letters = torch.frombuffer(bytearray(words.encode()), dtype=torch.uint8)[: len(text)]
        text[: len(letters)] = letters
        self._stages.send(message.to(self._device), self._stages.rank + 1)


def _words(message: torch.Tensor) -> str:
    """Read an error's words, as many as the message had room for."""
    letters = bytes(message[:-1].cpu().contiguous().view(torch.uint8).view(-1).tolist())
    return letters.rstrip(b"\0").decode(errors="replace")
