"""The broker over NATS JetStream, around it the connection, the servers and the deployment."""
