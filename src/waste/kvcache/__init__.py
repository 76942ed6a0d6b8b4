"""What a session remembers: latent rows and index keys of MLA layers, recurrent states of KDA layers."""
