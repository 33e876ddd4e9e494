"""How the bundled demo model is made: its text, its tokenizer, its training and its score."""
