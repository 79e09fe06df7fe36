"""The backend that computes with llama.cpp: GGUF files in its kernels, with Penstock's sampler and scheduling."""
