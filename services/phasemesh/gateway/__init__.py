"""REST in front of the mesh."""
