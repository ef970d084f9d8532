"""Base against head in one session."""
