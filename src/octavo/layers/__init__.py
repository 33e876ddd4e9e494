"""Building blocks of models. A layer owns its parameters: their shapes, how they are loaded and packed."""
