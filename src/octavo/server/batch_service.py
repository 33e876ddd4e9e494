"""`BatchService`: files and batches of a server with a state folder, from its start to its end."""

import asyncio
import logging
from pathlib import Path

from octavo.errors import StateError
from octavo.server.args import ServerArgs
from octavo.server.file_store import FileStore
from octavo.server.state_db import StateDatabase

logger = logging.getLogger(__name__)

_SWEEP_S = 60.0


class BatchService:
    """Opened with the folder locked (`server/state_dir.py`). Owned by one event loop while it runs."""

    def __init__(self, state_dir: str, args: ServerArgs) -> None:
        """Raises InvalidParameterError: the database cannot be used."""
        folder = Path(state_dir)
        self._database = StateDatabase(folder / "batches.sqlite3")
        self.files = FileStore(self._database, folder / "files", args)

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            try:
                await self.files.sweep()
            except StateError as error:
                logger.error("expired files stay for now: %s", error)
            await asyncio.sleep(_SWEEP_S)

    def close(self) -> None:
        self._database.close()
