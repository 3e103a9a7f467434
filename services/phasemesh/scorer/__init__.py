"""The scorer service: MaxSim over stored token embeddings."""
