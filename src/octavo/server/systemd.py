"""What a service manager is told: that the model is loaded, that the server shuts down. For units of `Type=notify`.

Source: `man 3 sd_notify`.
"""

import logging
import os
import socket

logger = logging.getLogger(__name__)

READY, STOPPING = "READY=1", "STOPPING=1"


def notify(*lines: str) -> None:
    """Tell the service manager, if one has started this process; a failure is logged, as serving goes on without."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # a name without a file
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.connect(address)
            sender.sendall("\n".join(lines).encode())
    except OSError as error:
        logger.warning("the service manager was not told %s: %s", lines[0], error)
