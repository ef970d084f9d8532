"""Arms that misbehave and sessions that are killed: what pytest-fp8 says, and what stays behind."""
