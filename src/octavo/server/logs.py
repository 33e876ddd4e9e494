"""Log formats: text for people, or one JSON object per line for programs."""

import logging
import sys
import time

import msgspec

from octavo.server.args import LogFormat, LogLevel

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"


class JsonFormatter(logging.Formatter):
    """Keys `time` (UTC), `level`, `logger`, `message`, `error` with a traceback, and the record's own `facts`."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime(TIME_FORMAT, time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        line.update(getattr(record, "facts", {}))
        return msgspec.json.encode(line).decode()


def configure_logging(level: LogLevel, log_format: LogFormat) -> None:
    """Send all logs to standard error in this format; called once, by the program."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(TEXT_FORMAT, TIME_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Logged with the client's address by server/http_protocol.py.
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.msg != "Invalid HTTP request received.")
    if level == "info":  # uvicorn's start and stop messages, which we log ourselves
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
