"""The engine core's side: scheduling."""
