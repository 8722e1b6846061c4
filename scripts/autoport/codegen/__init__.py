"""Steps 3 to 6: the port's files and the registry row."""
