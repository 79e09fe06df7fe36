"""Generation plug-ins: how other packages change which tokens are drawn, where an answer ends, and what its text is."""
