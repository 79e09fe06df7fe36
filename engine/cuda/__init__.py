"""What is compiled for NVIDIA's GPUs: the sources, and the products that they compute."""
