"""A report as one HTML file: its content, its charts, and the document around them."""
