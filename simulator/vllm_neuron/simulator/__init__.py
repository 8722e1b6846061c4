"""What the simulator has beyond the plugin: rank set-up, model overlay, device rules, and a harness."""
