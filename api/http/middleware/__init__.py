"""What every request passes: limits of connections, keys, what browsers may do, the access log."""
