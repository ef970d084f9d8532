"""The inside of an arm's process: models, training steps, what they execute. torch is here."""
