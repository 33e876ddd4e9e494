"""What the host pays for a step, beside the model."""
