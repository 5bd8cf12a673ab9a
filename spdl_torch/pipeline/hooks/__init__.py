"""What users subclass to time stages and queues, and the thread that calls them back."""
