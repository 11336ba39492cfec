"""The only room that ever holds the secret: it turns votes into released tokens."""
