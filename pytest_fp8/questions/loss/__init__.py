"""Is the loss still right? Curves of both arms over several seeds."""
