"""What operators see of a running server, and how they act on it: the page, its stream of events, and dead letters."""
