"""A ladder to cells to finished runs to one table."""
