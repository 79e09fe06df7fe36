"""The batch stage: lanes, the picture of the workers, and who gets what."""
