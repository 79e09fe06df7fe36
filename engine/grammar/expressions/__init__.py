"""Regular expressions: read, made into what xgrammar follows without doubt, and written for it."""
