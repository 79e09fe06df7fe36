"""How batches run: their input, their results, and the runner that holds them."""
