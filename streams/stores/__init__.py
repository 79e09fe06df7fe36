"""What is kept in the broker: objects, conversations, responses, cards of the living, dead letters."""
