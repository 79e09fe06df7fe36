"""What people and programs use: the HTTP bridge, the commands, the library's adapters, tools and benchmarks."""
