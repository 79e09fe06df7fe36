"""The towers of models that see, which transformers takes from the library timm, without it."""
