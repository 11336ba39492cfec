"""Records, who is in which world, the workspace on disk. This room knows no probabilities, no model and no secret."""
