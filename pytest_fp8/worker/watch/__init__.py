"""Observers of one step: modules, operators, kernels, collectives, products. They know of no arm."""
