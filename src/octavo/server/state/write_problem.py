"""`WriteProblem`: why a file is not written that no request needs. `/health` shows it while it lasts."""

import logging

_MAX_SAID = 100  # different texts


class WriteProblem:
    """Each text is logged once."""

    def __init__(self, logger: logging.Logger, consequence: str) -> None:
        self._logger, self._consequence = logger, consequence
        self._said: set[str] = set()
        self.text: str | None = None  # None: all is well

    def set(self, text: str) -> None:
        self.text = text
        if text not in self._said and len(self._said) < _MAX_SAID:
            self._said.add(text)
            self._logger.error("%s: %s (logged once)", self._consequence, text)

    def clear(self) -> None:
        self.text = None
