"""HTTP itself: exchanges, errors on the wire, streams of events, uploads, the limits of connections."""
