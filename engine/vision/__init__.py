"""Images in prompts: their bytes, their places among the tokens, and the models that see them."""
