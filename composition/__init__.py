"""The composition root: the commands that run Penstock assemble its processes here, from parts that do not import each
other. Each process has a module, so that it imports only what it runs."""
