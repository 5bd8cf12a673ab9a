"""Sources and stages while they run: threads take an item, call the op, pass the result on."""
