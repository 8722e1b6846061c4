"""Step 1: what the modeling file computes, read as text. Nothing of it is imported."""
