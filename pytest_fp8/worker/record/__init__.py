"""What is recorded of training steps: one table of an uncompiled step, and the kernels of the step as it runs."""
