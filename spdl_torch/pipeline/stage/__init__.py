"""Sources and stages while they run: threads that take an item, call the op and pass it on."""
