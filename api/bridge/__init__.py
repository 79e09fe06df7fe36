"""From a request to its events and back: publishing jobs, reading and resuming their streams."""
