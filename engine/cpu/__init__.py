"""The compiled kernels for CPUs, their memory layout of weights, and the set-up of a process that computes."""
