"""From text to tokens and back: tokenizers, chat templates, and what a model's text says, thinks and calls."""
