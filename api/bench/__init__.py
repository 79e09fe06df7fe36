"""`penstock bench`: servers, loads and reports."""
