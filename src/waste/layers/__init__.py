"""The layer kinds, each written once against `Ops`: residual, attention, feed forward."""
