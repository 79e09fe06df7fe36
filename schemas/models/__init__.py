"""The catalogue of models, the states they go through, and which host loads which of them."""
