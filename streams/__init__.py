"""The broker as a small port (`port`), its implementations (`nats`, `memory`), the subjects, streams and buckets of the
pipeline (`topology`), and what is stored in them (`stores`)."""
