"""The stage `infer`, a worker: the engine runs a batch, and its tokens are published as they appear."""
