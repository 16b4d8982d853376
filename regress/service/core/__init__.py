"""The training service behind every wire: sessions, ordered queues, operations, saves, restart and executors."""
