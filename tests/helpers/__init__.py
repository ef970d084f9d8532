"""What several test modules use: stand-ins, sample data, small models."""
