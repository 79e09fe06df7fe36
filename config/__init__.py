"""Settings, logging and process set-up: what every process of Penstock does first. Imports only schemas."""
