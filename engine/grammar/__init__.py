"""What an answer may look like: JSON Schemas, regular expressions and tool calls as grammars over tokens."""
