"""The paths of the models on offer: their states, what operators change about them, and their adapters."""
