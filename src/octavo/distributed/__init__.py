"""Communication between ranks: groups and collectives."""
