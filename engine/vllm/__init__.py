"""The backend that computes with vLLM: its engine core, batching, caches and sampler, fed with token ids."""
