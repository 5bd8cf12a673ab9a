"""What a pipeline is made of, before anything runs."""
