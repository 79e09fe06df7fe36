"""Commands that use a running server over HTTP, as any client may."""
