"""The Responses API: its request, its tools, and the items that it takes and gives."""
