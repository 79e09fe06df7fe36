"""The compiled kernels for CPUs, how weights lie in memory for them, and how a process that computes is set up."""
