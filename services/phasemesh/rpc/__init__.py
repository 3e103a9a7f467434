"""gRPC plumbing that every role shares."""
