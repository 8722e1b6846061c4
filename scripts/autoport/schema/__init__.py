"""The files that steps hand to each other, as types, one module for each topic."""
