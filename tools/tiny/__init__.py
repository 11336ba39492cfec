"""How the embedded base model `tiny` is made: data, tokenizer, training, measurement. Not installed."""
