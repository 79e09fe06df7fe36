"""A deployment in virtual time: the real stages and the engine's real scheduler, over workers that compute nothing."""
