"""One rank's side: worker and model runner."""
