"""Administration of a deployment: its one configuration and its streams, set up, compared, migrated and backed up."""
