"""The broker over NATS JetStream; in rooms, its connection, the servers, and the administration of a deployment."""
