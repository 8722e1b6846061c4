"""Step 1: what the config, the checkpoint's headers and the modeling source say."""
