"""From a checkpoint's files to a recipe; free of torch."""
