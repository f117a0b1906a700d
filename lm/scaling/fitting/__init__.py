"""How a law is fitted: objectives, the batched solver, its certificate, resamples."""
