"""Checkpoints of a live arm: its own two stores, the user's ``save()`` and ``load()``, and scaling state."""
