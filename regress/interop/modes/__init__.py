"""Three modes of one training, aligned by datum and token: the trainer itself, a client of a service, the service."""
