"""`penstock bench chaos`: faults, and the judge of what was stored."""
