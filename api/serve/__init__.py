"""`penstock serve`: all processes under one supervisor."""
