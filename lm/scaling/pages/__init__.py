"""A fit to read and to look at: text, figures, the report."""
