"""Settings of every role, from file, environment and flags."""
