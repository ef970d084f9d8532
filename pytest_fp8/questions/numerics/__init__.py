"""The question ``numerics``: what each product computed, forward and backward, and the gradients of both arms."""
