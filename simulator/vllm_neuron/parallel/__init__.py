"""Process groups of the plugin."""
