"""Step 7: the checklists, as programs."""
