"""What runs on CUDA alone: attention in Triton kernels, and decoding as recorded graphs."""
