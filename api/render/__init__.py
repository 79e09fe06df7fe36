"""From client events to the answers of OpenAI's and Anthropic's APIs: pure."""
