"""What will run a model, on which device, in how much memory: known from files alone, before torch is imported."""
