"""Where loading stands, as a state that can be saved and loaded again."""
