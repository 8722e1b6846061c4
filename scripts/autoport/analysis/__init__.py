"""Step 2: reference model, architecture, parallel plan and weight map."""
