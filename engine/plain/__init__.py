"""Plain decoders: their modules and how they are loaded, without transformers."""
