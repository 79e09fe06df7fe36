"""A step without the model's own modules: a plain decoder of few operations, and what its layers are made of."""
