"""From an OpenAI request to prompts in tokens, parameters and a grammar."""
