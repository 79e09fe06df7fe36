"""A step without the model's own modules: the plain decoder, its compiled twin, and the proof that both are right."""
