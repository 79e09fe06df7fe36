"""How each family of models that see shows a picture: its tiles, its numbers, and the text that stands for it."""
