"""What is recorded of training steps: calls, products, gradients, times."""
