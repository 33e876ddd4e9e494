"""Offline batches: decode and prefill tables beside a peer."""
