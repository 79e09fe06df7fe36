"""How log lines and tracebacks look, and where they go."""
