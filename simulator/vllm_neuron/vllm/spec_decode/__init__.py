"""Speculative decoding: what a target model takes part in."""
