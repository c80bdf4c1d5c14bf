"""A run as an object: its figures and tables, without any rendering."""
