"""Putting the skills where a coding agent looks for them."""
