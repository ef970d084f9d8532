"""Models, batches and the training step of the suite."""
