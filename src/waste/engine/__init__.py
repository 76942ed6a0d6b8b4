"""The engine: a loaded model (`Engine`) and one timeline of tokens on it (`Session`). Token ids in, logits out."""
