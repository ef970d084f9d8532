"""Can I switch back? Checkpoints carried from each arm to the other."""
