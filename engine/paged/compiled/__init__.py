"""A whole step as one compiled call on a CPU: the plain decoder's twin, and the proof that it computes the same."""
