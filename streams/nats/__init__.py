"""The broker over NATS JetStream, and the NATS servers that Penstock starts."""
