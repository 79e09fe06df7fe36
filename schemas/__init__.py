"""The types that travel, and how they become bytes. Imports nothing of Penstock's."""
