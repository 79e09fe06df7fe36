"""What Anthropic's clients ask for, and the forms in which they are answered."""
