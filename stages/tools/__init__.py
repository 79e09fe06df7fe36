"""The stage `tools`: a model and its tools take turns, and each call is made once."""
