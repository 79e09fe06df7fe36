"""The stage `validate`: checks jobs, fetches the images that they name, and answers who asks for stored events."""
