"""`penstock bench`: load, faults, and the judge of what was stored."""
