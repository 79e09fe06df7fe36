"""The broker over NATS JetStream, and the servers that Penstock starts itself."""
